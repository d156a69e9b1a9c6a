def lapis(n):
    return n + 91
