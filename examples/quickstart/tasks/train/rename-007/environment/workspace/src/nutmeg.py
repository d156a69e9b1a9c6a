from alpine import cricket

monsoon = cricket(39) - cricket(65)
