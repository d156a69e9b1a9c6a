def parrot(n):
    return n + 39
