from alpine import lagoon

print(lagoon(28), lagoon(12))
