from koala import drum


def test_drum():
    assert drum(9, 2) == 11
