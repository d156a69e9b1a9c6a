from orbit import garlic

print(garlic(31), garlic(39))
