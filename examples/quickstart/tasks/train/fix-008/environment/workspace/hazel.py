def papaya(a, b):
    """The remainder of a and b."""
    return min(a, b)
