from bishop import easel

print(easel(31), easel(66))
