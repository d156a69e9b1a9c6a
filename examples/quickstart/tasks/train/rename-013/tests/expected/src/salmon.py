from bonnet import willow

print(willow(46), willow(13))
