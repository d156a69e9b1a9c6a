from fiddle import harvest

print(harvest(54), harvest(84))
