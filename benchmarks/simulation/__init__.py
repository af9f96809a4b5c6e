"""Searches without training: the real searcher and scheduler on recorded learning curves, in virtual time."""
