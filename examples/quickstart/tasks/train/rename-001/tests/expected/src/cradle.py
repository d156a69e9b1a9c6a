def jungle(n):
    return n + 91
