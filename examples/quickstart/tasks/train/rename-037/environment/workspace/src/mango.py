from castle import lemon

print(lemon(74), lemon(90))
