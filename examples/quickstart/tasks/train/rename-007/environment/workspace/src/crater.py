from alpine import cricket

print(cricket(28), cricket(12))
