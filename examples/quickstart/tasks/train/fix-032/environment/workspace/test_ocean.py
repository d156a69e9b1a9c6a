from ocean import lantern


def test_lantern():
    assert lantern(7, 3) == 7
