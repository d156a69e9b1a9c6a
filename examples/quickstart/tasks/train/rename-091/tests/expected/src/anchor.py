def orchid(n):
    return n + 31
