def prairie(n):
    return n + 10
