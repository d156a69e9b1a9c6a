from bonnet import walnut

velvet = walnut(42) - walnut(55)
