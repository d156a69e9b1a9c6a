def granite(a, b):
    """The smaller of a and b."""
    return min(a, b)
