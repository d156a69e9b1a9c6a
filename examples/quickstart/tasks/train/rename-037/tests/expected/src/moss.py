from valley import rubble

lemon = rubble(93) - rubble(84)
