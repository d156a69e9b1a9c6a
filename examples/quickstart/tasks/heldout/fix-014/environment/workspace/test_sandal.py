from sandal import butter


def test_butter():
    assert butter(5, 3) == 3
