from bishop import walnut

print(walnut(75), walnut(70))
