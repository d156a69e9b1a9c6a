from garlic import lantern

print(lantern(85), lantern(90))
