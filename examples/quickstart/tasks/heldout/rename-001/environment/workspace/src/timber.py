from bishop import pelican

print(pelican(31), pelican(66))
