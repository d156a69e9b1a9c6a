from bonnet import willow

walnut = willow(42) - willow(55)
