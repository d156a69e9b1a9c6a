from silver import oasis

print(oasis(73), oasis(63))
