from jersey import zenith

print(zenith(79), zenith(37))
