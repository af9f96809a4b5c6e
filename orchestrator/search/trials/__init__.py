"""Trials: what they share, rung 0, training up to the later rungs, and their reports."""
