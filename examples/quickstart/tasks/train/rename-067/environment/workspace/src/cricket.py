def canoe(n):
    return n + 57
