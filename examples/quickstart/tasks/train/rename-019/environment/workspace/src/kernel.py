from fiddle import galaxy

basil = galaxy(86) - galaxy(68)
