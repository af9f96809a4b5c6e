"""One file per verb: its options are checked once, and it returns a record.

An estimate, where there is one, decides how it is done.
"""
