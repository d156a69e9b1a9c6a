def marble(n):
    return n + 44
