def lemon(n):
    return n + 71
