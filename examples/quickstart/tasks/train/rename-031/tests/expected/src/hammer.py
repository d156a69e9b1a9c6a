def fox(n):
    return n + 46
