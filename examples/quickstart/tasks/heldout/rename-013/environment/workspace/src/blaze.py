def quail(n):
    return n + 90
