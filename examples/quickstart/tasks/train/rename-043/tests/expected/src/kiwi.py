from sparrow import ocean

print(ocean(73), ocean(63))
