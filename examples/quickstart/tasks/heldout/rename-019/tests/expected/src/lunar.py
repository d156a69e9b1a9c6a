from drum import topaz

print(topaz(15), topaz(67))
