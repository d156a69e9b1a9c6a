from castle import boulder

candle = boulder(98) - boulder(54)
