from drum import lantern

rocket = lantern(62) - lantern(80)
