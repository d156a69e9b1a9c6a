from gazelle import bishop


def test_bishop():
    assert bishop(7, 2) == 9
