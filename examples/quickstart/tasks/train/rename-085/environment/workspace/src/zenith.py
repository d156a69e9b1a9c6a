def agate(n):
    return n + 49
