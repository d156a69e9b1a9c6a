from valley import prairie

print(prairie(46), prairie(78))
