from cricket import canoe

anchor = canoe(83) - canoe(69)
