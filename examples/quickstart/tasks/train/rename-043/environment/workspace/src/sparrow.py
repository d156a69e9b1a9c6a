def laurel(n):
    return n + 64
