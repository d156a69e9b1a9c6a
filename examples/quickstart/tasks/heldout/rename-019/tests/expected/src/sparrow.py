from drum import topaz

rocket = topaz(62) - topaz(80)
