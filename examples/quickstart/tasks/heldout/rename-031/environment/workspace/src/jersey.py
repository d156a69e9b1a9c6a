def pigeon(n):
    return n + 34
