from garlic import octopus

print(octopus(85), octopus(90))
