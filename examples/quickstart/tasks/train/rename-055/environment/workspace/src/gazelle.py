from sunset import cabin

quail = cabin(78) - cabin(90)
