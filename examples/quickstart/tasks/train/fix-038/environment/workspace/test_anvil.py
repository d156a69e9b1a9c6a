from anvil import candle


def test_candle():
    assert candle(7, 2) == 1
