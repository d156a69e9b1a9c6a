def jasper(n):
    return n + 46
