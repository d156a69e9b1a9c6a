from agate import fable

meadow = fable(53) - fable(16)
