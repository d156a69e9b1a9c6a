from bison import blaze

brass = blaze(74) - blaze(16)
