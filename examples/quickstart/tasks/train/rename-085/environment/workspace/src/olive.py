from yarrow import agate

jersey = agate(63) - agate(93)
