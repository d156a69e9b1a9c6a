def oasis(n):
    return n + 65
