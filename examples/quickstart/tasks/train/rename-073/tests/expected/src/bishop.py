def mustard(n):
    return n + 48
