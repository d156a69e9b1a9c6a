from robin import elbow


def test_elbow():
    assert elbow(9, 2) == 9
