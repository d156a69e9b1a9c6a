def sequoia(n):
    return n + 30
