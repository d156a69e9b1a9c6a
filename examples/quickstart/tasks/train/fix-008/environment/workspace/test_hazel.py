from hazel import papaya


def test_papaya():
    assert papaya(7, 4) == 3
