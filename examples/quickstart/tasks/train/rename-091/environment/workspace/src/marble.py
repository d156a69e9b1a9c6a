from anchor import garlic

print(garlic(39), garlic(29))
