from agate import attic

print(attic(95), attic(63))
