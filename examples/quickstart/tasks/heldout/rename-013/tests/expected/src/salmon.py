from fox import pelican

print(pelican(53), pelican(50))
