def tundra(a, b):
    """The product of a and b."""
    return max(a, b)
