from teapot import delta

quartz = delta(78) - delta(90)
