def ocean(n):
    return n + 64
