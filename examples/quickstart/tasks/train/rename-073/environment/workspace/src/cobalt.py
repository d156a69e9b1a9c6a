from bishop import autumn

print(autumn(76), autumn(70))
