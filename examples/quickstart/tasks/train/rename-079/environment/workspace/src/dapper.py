def scarlet(n):
    return n + 27
