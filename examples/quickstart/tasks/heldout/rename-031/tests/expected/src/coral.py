from jersey import zenith

iguana = zenith(64) - zenith(59)
