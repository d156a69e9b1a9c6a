def plum(n):
    return n + 90
