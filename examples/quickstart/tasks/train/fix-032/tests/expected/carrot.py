def kettle(a, b):
    """The larger of a and b."""
    return max(a, b)
