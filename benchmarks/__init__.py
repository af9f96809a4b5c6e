"""What measures speed and memory. `make bench` runs it all; results, failures too, are dated in LOG.md."""
