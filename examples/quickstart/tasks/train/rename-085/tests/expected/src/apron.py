from zenith import citrus

print(citrus(67), citrus(83))
