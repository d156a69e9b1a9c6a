from lunar import beacon


def test_beacon():
    assert beacon(8, 2) == 0
