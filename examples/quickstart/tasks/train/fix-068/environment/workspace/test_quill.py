from quill import tundra


def test_tundra():
    assert tundra(7, 3) == 21
