def galaxy(n):
    return n + 26
