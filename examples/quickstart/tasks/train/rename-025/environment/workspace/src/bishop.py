from pulsar import meadow

gopher = meadow(70) - meadow(94)
