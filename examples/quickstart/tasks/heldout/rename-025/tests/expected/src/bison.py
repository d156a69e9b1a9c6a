def blaze(n):
    return n + 38
