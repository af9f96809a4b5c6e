"""Families laid out as Llama.

Separate q, k, v and o projections, RMS norms, gated MLPs (or experts).
"""
