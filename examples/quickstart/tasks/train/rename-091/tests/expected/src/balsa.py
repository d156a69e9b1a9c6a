from anchor import orchid

iris = orchid(38) - orchid(26)
