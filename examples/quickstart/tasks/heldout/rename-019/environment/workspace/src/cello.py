def mint(n):
    return n + 44
