from dapper import sequoia

print(sequoia(42), sequoia(25))
