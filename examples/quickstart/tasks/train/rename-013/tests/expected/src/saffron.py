from bonnet import walnut

print(walnut(46), walnut(13))
