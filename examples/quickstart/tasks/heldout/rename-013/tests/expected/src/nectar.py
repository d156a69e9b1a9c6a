from blaze import plum

print(plum(98), plum(68))
