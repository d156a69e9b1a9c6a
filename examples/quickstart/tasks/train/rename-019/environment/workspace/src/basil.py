from beetle import sequoia

print(sequoia(84), sequoia(76))
