from kiwi import walnut


def test_walnut():
    assert walnut(9, 2) == 2
