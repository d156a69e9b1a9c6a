from cactus import cargo

berry = cargo(59) - cargo(51)
