from mustard import glacier

lotus = glacier(30) - glacier(26)
