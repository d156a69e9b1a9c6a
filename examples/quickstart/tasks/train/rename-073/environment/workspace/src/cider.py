from bishop import autumn

prairie = autumn(69) - autumn(95)
