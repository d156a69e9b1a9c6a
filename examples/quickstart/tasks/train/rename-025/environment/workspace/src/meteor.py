from pulsar import meadow

print(meadow(43), meadow(48))
