def drum(n):
    return n + 13
