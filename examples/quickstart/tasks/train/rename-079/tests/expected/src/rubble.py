from dapper import lemon

anchor = lemon(58) - lemon(28)
