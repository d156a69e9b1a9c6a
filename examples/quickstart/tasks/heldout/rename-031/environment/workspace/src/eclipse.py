from plum import paddle

onyx = paddle(76) - paddle(45)
