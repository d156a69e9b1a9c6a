def lynx(a, b):
    """The difference of a and b."""
    return max(a, b)
