from ribbon import orchid

print(orchid(31), orchid(90))
