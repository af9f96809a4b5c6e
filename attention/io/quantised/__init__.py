"""Quantised sources, and the checkpoint of plain safetensors that is made of them."""
