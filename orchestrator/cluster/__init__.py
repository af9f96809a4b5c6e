"""The Ray cluster of a search: its session, and the pool of training workers."""
