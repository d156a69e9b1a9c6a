def garlic(n):
    return n + 31
