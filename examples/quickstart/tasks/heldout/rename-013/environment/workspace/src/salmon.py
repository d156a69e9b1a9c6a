from fox import camel

print(camel(53), camel(50))
