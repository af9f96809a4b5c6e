"""The Ray cluster of a search: session, capacity, and the pool of training workers."""
