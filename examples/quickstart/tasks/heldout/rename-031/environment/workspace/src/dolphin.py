from plum import paddle

print(paddle(99), paddle(61))
