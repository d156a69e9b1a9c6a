from pulsar import dune

gopher = dune(70) - dune(94)
