def camel(n):
    return n + 87
