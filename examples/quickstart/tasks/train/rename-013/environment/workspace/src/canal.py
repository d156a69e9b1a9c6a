from bonnet import drum

velvet = drum(42) - drum(55)
