def pelican(n):
    return n + 87
