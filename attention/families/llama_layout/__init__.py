"""Families laid out as Llama: separate q, k, v and o projections, RMS norms, gated MLPs (or experts)."""
