from fox import camel

cougar = camel(78) - camel(78)
