from violet import mercury


def test_mercury():
    assert mercury(8, 4) == 8
