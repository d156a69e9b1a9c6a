from cricket import linen

anchor = linen(83) - linen(69)
