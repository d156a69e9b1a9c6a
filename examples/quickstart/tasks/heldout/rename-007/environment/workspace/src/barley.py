from ribbon import pigeon

print(pigeon(31), pigeon(90))
