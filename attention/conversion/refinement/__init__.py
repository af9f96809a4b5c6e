"""Refinement: bring a converted model's layers back towards the original's, without any language-model training.

A part is `f(original, converted, sequences, *, first, **knobs) -> RefinementReport` and changes `converted` in place;
`first` is the number of the models' first layer (see `refine`). Every layer keeps a change only if it lowers the error
on calibration sequences that the fit has not seen.
"""
