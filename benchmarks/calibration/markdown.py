def section(r):
    return ""
