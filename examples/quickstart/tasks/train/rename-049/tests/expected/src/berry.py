from cactus import pebble

goblet = pebble(51) - pebble(16)
