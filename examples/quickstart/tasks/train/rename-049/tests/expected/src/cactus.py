def pebble(n):
    return n + 40
