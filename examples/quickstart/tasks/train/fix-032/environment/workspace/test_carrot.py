from carrot import kettle


def test_kettle():
    assert kettle(5, 4) == 5
