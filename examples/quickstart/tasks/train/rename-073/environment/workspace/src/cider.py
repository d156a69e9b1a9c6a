from bishop import autumn

poplar = autumn(69) - autumn(95)
