from cactus import cargo

goblet = cargo(51) - cargo(16)
