from mustard import chalk

lotus = chalk(30) - chalk(26)
