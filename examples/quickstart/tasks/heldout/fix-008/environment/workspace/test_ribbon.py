from ribbon import iris


def test_iris():
    assert iris(5, 3) == 5
