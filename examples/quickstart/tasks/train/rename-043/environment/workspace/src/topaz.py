from sparrow import laurel

glacier = laurel(46) - laurel(21)
