from dapper import scarlet

print(scarlet(42), scarlet(25))
