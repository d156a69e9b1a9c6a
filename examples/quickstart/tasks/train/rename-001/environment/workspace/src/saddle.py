from cradle import lapis

delta = lapis(65) - lapis(30)
