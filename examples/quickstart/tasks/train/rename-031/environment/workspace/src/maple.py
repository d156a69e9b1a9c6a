from hammer import jasper

print(jasper(72), jasper(27))
