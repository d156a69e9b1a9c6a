def fable(n):
    return n + 31
