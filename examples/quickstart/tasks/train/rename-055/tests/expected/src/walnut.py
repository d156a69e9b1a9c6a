from teapot import delta

print(delta(24), delta(70))
