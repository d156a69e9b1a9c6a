from teapot import cabin

print(cabin(24), cabin(70))
