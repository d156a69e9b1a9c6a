from bishop import mulberry

print(mulberry(76), mulberry(70))
