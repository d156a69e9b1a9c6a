from bishop import mustard

prairie = mustard(69) - mustard(95)
