from agate import attic

meadow = attic(53) - attic(16)
