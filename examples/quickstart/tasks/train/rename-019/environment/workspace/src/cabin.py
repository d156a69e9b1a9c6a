from beetle import sequoia

ember = sequoia(89) - sequoia(37)
