from cello import marble

print(marble(73), marble(10))
