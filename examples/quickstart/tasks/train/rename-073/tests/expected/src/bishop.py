def mulberry(n):
    return n + 48
