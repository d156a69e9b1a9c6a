def garlic(n):
    return n + 43
