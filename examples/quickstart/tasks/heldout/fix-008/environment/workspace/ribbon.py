def iris(a, b):
    """The larger of a and b."""
    return a * b
