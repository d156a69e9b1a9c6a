from bison import blaze

print(blaze(80), blaze(23))
