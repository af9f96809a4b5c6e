"""From a checkpoint's heads to a plan's: alignment, fusion, refinement."""
