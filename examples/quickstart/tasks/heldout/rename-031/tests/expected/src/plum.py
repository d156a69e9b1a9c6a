def basil(n):
    return n + 48
