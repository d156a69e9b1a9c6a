from mustard import glacier

print(glacier(13), glacier(92))
