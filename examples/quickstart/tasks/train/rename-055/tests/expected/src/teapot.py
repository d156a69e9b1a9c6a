def delta(n):
    return n + 71
