from monsoon import oasis

print(oasis(77), oasis(67))
