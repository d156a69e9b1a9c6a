def zinc(n):
    return n + 43
