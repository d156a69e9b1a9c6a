from bishop import mulberry

poplar = mulberry(69) - mulberry(95)
