def granite(a, b):
    """The smaller of a and b."""
    return a % b
