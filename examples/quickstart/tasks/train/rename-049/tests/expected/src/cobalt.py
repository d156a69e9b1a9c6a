from cactus import pebble

print(pebble(39), pebble(59))
