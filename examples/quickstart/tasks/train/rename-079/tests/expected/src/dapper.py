def lemon(n):
    return n + 27
