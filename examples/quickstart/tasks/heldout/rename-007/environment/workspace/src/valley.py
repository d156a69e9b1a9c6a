def yarrow(n):
    return n + 10
