from sunset import cabin

print(cabin(24), cabin(70))
