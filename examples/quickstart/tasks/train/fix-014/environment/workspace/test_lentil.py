from lentil import petal


def test_petal():
    assert petal(7, 2) == 9
