from valley import yarrow

print(yarrow(46), yarrow(78))
