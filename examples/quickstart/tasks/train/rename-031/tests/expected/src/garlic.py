def lantern(n):
    return n + 92
