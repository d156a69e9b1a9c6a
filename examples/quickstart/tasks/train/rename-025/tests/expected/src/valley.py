from agate import fable

print(fable(95), fable(63))
