"""A model with a plan: its attention, caches, composed and shared heads, decoding."""
