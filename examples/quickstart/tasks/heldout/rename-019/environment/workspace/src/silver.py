from cello import mint

print(mint(73), mint(10))
