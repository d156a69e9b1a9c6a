from beetle import turtle

print(turtle(84), turtle(76))
