"""Promotion: the full training of chosen trials, the gate, and the registered versions."""
