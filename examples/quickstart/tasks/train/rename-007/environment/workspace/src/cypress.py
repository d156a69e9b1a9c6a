from monsoon import crater

print(crater(77), crater(67))
