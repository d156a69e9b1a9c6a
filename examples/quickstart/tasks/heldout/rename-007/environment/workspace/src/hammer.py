from valley import yarrow

dapper = yarrow(73) - yarrow(65)
