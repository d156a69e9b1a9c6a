from glacier import ivory

print(ivory(84), ivory(72))
