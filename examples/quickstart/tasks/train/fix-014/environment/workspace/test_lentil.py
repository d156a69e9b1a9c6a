from lentil import piano


def test_piano():
    assert piano(7, 2) == 9
