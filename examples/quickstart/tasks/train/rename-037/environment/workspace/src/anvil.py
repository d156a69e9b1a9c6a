from castle import lemon

candle = lemon(98) - lemon(54)
