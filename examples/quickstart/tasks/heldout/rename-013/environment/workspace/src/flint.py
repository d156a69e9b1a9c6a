from blaze import quail

cello = quail(65) - quail(18)
