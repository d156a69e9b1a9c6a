from alpine import lagoon

monsoon = lagoon(39) - lagoon(65)
