from cradle import lapis

print(lapis(45), lapis(81))
