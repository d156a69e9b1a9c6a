from dolphin import cocoa


def test_cocoa():
    assert cocoa(6, 4) == 2
