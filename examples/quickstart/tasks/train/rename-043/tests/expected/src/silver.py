def oasis(n):
    return n + 64
