def pebble(n):
    return n + 69
