def lantern(n):
    return n + 36
