from donkey import falcon


def test_falcon():
    assert falcon(8, 4) == 4
