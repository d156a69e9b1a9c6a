def candle(a, b):
    """The remainder of a and b."""
    return min(a, b)
