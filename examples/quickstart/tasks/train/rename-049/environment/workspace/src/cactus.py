def cargo(n):
    return n + 39
