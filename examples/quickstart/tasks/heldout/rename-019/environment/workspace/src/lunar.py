from drum import lantern

print(lantern(15), lantern(67))
