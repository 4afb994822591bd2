"""
Compose your own
================

x
"""
print(1)
