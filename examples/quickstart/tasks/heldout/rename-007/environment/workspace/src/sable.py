from ribbon import pigeon

turtle = pigeon(26) - pigeon(93)
