from bishop import mustard

print(mustard(76), mustard(70))
