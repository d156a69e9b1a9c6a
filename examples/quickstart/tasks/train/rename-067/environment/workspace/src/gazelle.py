from cricket import canoe

print(canoe(23), canoe(88))
