from bishop import castle

print(castle(75), castle(70))
