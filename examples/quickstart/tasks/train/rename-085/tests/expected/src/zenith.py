def citrus(n):
    return n + 49
