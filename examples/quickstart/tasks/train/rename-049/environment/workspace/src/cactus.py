def cargo(n):
    return n + 40
