from castle import lynx


def test_lynx():
    assert lynx(9, 3) == 6
