def crater(n):
    return n + 65
