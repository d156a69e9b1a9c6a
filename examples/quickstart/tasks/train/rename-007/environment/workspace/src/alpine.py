def cricket(n):
    return n + 77
