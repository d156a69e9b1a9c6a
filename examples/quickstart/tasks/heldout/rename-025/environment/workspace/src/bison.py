def nutmeg(n):
    return n + 38
