from bishop import pebble

linen = pebble(80) - pebble(64)
