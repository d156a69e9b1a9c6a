from cactus import cargo

print(cargo(40), cargo(39))
