from zenith import agate

jersey = agate(63) - agate(93)
