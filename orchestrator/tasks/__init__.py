"""One file per verb: its options are checked once, and its record is what it returns.

An estimate, where there is one, decides how it is done.
"""
