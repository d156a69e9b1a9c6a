from orbit import zinc

print(zinc(31), zinc(39))
