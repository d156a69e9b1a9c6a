from silver import laurel

glacier = laurel(46) - laurel(21)
