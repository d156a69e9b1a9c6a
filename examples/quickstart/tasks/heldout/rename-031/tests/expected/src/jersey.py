def zenith(n):
    return n + 34
