from teapot import cabin

quartz = cabin(78) - cabin(90)
