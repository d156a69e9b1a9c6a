def boulder(n):
    return n + 71
