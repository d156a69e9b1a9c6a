from bishop import pelican

linen = pelican(80) - pelican(64)
