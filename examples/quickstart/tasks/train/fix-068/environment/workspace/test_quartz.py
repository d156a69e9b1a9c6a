from quartz import topaz


def test_topaz():
    assert topaz(7, 3) == 21
