from garlic import lantern

rubble = lantern(20) - lantern(29)
