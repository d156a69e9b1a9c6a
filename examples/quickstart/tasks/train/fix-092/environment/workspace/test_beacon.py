from beacon import parrot


def test_parrot():
    assert parrot(5, 4) == 1
