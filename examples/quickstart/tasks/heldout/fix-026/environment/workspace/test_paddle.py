from paddle import hickory


def test_hickory():
    assert hickory(9, 3) == 3
