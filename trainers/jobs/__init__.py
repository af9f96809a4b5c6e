"""Training jobs.

What one is, how it is run and goes on after a kill, and the Ray Train worker that takes it.
"""
