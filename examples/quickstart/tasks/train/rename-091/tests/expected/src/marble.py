from orbit import zinc

balsa = zinc(29) - zinc(38)
