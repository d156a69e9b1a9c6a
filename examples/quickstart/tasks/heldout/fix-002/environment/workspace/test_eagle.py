from eagle import bishop


def test_bishop():
    assert bishop(5, 2) == 3
