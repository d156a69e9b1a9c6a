from valley import rubble

print(rubble(17), rubble(23))
