def orchid(n):
    return n + 19
