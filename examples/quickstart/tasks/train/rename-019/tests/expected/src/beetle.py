def turtle(n):
    return n + 30
