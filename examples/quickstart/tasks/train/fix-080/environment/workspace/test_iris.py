from iris import cider


def test_cider():
    assert cider(5, 2) == 2
