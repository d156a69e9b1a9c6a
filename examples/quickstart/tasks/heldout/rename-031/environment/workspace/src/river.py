from jersey import pigeon

print(pigeon(79), pigeon(37))
