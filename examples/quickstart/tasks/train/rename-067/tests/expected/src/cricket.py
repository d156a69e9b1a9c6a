def linen(n):
    return n + 57
