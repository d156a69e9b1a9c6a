from sparrow import ocean

glacier = ocean(46) - ocean(21)
