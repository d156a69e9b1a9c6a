def lagoon(n):
    return n + 77
