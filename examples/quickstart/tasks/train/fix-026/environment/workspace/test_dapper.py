from dapper import iguana


def test_iguana():
    assert iguana(9, 3) == 27
