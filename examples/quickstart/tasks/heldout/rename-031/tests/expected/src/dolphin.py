from plum import basil

print(basil(99), basil(61))
