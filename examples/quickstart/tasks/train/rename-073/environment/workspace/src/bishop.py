def autumn(n):
    return n + 48
