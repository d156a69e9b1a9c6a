from fox import pelican

cougar = pelican(78) - pelican(78)
