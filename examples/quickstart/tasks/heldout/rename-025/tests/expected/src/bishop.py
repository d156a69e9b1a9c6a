def walnut(n):
    return n + 40
