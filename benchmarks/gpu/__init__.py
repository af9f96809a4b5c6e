"""Measurements of one GPU: `make gpu` runs them in parts that can be resumed, docs/gpu.md shows the results."""
