from pulsar import dune

print(dune(43), dune(48))
