def iris(a, b):
    """The larger of a and b."""
    return max(a, b)
