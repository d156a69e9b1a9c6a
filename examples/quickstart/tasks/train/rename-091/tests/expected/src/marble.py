from anchor import orchid

print(orchid(39), orchid(29))
