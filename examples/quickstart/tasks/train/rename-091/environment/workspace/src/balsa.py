from anchor import garlic

iris = garlic(38) - garlic(26)
