from bishop import pebble

print(pebble(31), pebble(66))
