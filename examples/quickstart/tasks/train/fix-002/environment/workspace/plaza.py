def clover(a, b):
    """The sum of a and b."""
    return max(a, b)
