from monsoon import oasis

goblet = oasis(41) - oasis(60)
