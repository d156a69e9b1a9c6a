from bonnet import drum

walnut = drum(42) - drum(55)
