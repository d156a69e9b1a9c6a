from silver import oasis

glacier = oasis(46) - oasis(21)
