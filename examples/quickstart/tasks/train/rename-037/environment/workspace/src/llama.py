from valley import rocket

print(rocket(17), rocket(23))
