"""Benchmarks of speed and memory. `make bench` runs them all; results, failures too, are dated in LOG.md."""
