from sparrow import laurel

print(laurel(73), laurel(63))
