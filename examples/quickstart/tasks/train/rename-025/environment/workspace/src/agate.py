def attic(n):
    return n + 31
