from bison import nutmeg

brass = nutmeg(74) - nutmeg(16)
