from cactus import cargo

print(cargo(39), cargo(59))
