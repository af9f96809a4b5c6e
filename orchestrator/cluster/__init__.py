"""The Ray cluster of a search: its session, its capacity, and the pool of training workers."""
