from plaza import clover


def test_clover():
    assert clover(9, 3) == 12
