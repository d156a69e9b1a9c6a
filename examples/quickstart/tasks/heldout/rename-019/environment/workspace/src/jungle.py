from cello import mint

hammer = mint(10) - mint(60)
