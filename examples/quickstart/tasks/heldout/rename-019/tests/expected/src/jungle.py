from cello import marble

hammer = marble(10) - marble(60)
