from glacier import tulip

print(tulip(84), tulip(72))
