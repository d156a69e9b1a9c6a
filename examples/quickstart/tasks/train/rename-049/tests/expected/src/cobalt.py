from cactus import parrot

print(parrot(40), parrot(39))
