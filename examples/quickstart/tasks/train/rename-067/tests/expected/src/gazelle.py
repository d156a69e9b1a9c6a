from cricket import linen

print(linen(23), linen(88))
