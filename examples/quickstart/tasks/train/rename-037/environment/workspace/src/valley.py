def rocket(n):
    return n + 83
