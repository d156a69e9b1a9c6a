from zenith import citrus

jersey = citrus(63) - citrus(93)
