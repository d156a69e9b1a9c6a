def willow(n):
    return n + 13
