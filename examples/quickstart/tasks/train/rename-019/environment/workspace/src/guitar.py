from fiddle import galaxy

print(galaxy(54), galaxy(84))
