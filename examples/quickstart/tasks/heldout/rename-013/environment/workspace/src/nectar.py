from blaze import quail

print(quail(98), quail(68))
