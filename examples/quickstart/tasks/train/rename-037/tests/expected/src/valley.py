def rubble(n):
    return n + 83
