"""Sources whose weights are not plain floating-point safetensors, and the plain checkpoint that is
made of them.
"""
