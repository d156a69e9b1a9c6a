from cradle import jungle

delta = jungle(65) - jungle(30)
