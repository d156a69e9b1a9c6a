from valley import rocket

lemon = rocket(93) - rocket(84)
