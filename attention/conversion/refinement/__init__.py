"""Refinement: bring converted layers back towards the original's, without training the model.

A part is `f(original, converted, sequences, *, first, **knobs) -> tuple[LayerFit, ...]`, changes
`converted` in place and keeps a change of a layer only if it lowers the error on sequences that the
fit has not seen. `first`: see `refine`.
"""
