from jersey import pigeon

iguana = pigeon(64) - pigeon(59)
