from hammer import fox

print(fox(72), fox(27))
