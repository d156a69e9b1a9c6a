from bison import nutmeg

print(nutmeg(80), nutmeg(23))
