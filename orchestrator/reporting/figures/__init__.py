"""Matplotlib figures of a search and of a checkpoint, from plain records."""
