from kernel import scarlet


def test_scarlet():
    assert scarlet(9, 3) == 9
