from hammer import jasper

agate = jasper(53) - jasper(70)
