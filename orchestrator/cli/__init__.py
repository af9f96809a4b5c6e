"""The verbs of the command line.

Each calls a function that a notebook can call too, and imports it late: the libraries of a verb
take seconds to load, which `--help` must not.
"""
