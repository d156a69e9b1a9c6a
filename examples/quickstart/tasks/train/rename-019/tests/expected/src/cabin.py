from beetle import turtle

ember = turtle(89) - turtle(37)
