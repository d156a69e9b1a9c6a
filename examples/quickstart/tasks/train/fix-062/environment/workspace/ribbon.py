def crystal(a, b):
    """The smaller of a and b."""
    return max(a, b)
