"""Promotion: the full training of chosen trials, the gate, and the registered version that comes of it."""
