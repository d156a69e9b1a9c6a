from alpine import helmet


def test_helmet():
    assert helmet(9, 2) == 1
