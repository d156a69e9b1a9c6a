from bishop import walnut

mercury = walnut(91) - walnut(32)
