from cactus import parrot

berry = parrot(59) - parrot(51)
