from sunset import delta

print(delta(24), delta(70))
