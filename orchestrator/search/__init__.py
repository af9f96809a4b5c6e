"""A search: what is tried, one trial, Tune's run of many, the journal, and how a killed search goes
on.
"""
