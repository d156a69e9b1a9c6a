from bishop import easel

linen = easel(80) - easel(64)
