from glacier import tulip

cider = tulip(51) - tulip(22)
