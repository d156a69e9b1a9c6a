from castle import boulder

print(boulder(74), boulder(90))
