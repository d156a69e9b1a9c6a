from hammer import fox

agate = fox(53) - fox(70)
