def kettle(a, b):
    """The larger of a and b."""
    return a % b
