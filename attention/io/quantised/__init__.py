"""Quantised sources.

And the checkpoint of plain floating-point safetensors that is made of them.
"""
