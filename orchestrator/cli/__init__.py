"""The verbs of the command line.

Each is a thin shell over a function that a notebook can call, and imports it late: a verb's
libraries take seconds to load, and `--help` must not.
"""
