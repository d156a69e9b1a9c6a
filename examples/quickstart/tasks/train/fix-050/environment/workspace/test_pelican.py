from pelican import alpine


def test_alpine():
    assert alpine(8, 3) == 8
