from autumn import dune


def test_dune():
    assert dune(7, 3) == 3
