from cradle import jungle

print(jungle(45), jungle(81))
