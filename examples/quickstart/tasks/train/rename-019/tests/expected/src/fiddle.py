def harvest(n):
    return n + 26
