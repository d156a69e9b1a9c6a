def ivory(n):
    return n + 83
