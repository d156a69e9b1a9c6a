def cabin(n):
    return n + 71
