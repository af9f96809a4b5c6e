"""Training jobs.

Their definition, running and resuming them, and the Ray Train worker that runs them.
"""
