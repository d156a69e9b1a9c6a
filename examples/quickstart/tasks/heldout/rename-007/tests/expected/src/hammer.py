from valley import prairie

dapper = prairie(73) - prairie(65)
