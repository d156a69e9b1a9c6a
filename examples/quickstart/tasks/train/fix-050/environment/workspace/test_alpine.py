from alpine import granite


def test_granite():
    assert granite(7, 2) == 2
