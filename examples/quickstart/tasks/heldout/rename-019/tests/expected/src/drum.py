def topaz(n):
    return n + 36
