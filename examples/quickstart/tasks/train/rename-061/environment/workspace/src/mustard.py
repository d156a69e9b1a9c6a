def glacier(n):
    return n + 22
