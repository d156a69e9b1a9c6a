from fountain import cobra


def test_cobra():
    assert cobra(8, 4) == 4
