from glacier import ivory

cider = ivory(51) - ivory(22)
