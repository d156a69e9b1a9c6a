from monsoon import crater

goblet = crater(41) - crater(60)
