"""Conversions without a search: what is asked for, in memory or layer by layer, what they cost and give."""
