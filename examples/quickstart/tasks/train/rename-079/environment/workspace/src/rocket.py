from dapper import scarlet

anchor = scarlet(58) - scarlet(28)
