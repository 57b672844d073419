def section(r): return ""
