from lantern import tiger


def test_tiger():
    assert tiger(8, 4) == 8
