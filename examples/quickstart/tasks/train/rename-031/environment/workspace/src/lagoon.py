from garlic import octopus

rubble = octopus(20) - octopus(29)
