def octopus(n):
    return n + 92
