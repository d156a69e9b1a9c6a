from ribbon import orchid

turtle = orchid(26) - orchid(93)
