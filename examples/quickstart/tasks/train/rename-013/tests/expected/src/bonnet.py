def walnut(n):
    return n + 13
