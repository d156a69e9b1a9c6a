from fiddle import harvest

basil = harvest(86) - harvest(68)
