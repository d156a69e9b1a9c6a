from plum import basil

onyx = basil(76) - basil(45)
