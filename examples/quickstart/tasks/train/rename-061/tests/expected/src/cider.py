from mustard import chalk

print(chalk(13), chalk(92))
