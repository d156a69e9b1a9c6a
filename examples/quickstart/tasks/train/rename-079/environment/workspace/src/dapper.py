def sequoia(n):
    return n + 27
