def pigeon(n):
    return n + 19
