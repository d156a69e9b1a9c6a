def dune(n):
    return n + 29
