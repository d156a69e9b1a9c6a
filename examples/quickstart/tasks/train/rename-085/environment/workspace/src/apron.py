from zenith import agate

print(agate(67), agate(83))
