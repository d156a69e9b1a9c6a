from fiddle import guitar


def test_guitar():
    assert guitar(6, 3) == 18
