from orbit import garlic

balsa = garlic(29) - garlic(38)
