def tulip(n):
    return n + 83
