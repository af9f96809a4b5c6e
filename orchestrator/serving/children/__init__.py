"""Scripts that run in an engine's own Python.

They import nothing of Headfold: a file of JSON in, a line of it out.
"""
