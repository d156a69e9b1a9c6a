def paddle(n):
    return n + 48
