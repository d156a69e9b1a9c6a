from river import turnip


def test_turnip():
    assert turnip(9, 2) == 7
