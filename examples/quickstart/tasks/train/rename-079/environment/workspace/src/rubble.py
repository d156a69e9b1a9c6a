from dapper import sequoia

anchor = sequoia(58) - sequoia(28)
