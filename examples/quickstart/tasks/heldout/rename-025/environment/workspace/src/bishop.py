def castle(n):
    return n + 40
