def pelican(n):
    return n + 69
