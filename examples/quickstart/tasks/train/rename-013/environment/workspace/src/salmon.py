from bonnet import drum

print(drum(46), drum(13))
