from sunset import delta

quail = delta(78) - delta(90)
