def mercury(a, b):
    """The larger of a and b."""
    return min(a, b)
