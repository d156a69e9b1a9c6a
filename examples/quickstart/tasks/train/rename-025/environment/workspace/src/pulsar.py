def meadow(n):
    return n + 29
