from branch import garlic


def test_garlic():
    assert garlic(6, 2) == 6
