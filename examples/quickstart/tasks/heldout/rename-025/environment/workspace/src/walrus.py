from bishop import castle

mercury = castle(91) - castle(32)
