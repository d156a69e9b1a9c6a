from blaze import plum

cello = plum(65) - plum(18)
