from dapper import lemon

print(lemon(42), lemon(25))
