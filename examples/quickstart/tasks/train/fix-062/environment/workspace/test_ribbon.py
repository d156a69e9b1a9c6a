from ribbon import crystal


def test_crystal():
    assert crystal(9, 3) == 3
