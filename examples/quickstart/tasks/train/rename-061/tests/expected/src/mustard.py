def chalk(n):
    return n + 22
