"""Statistics of a checkpoint's heads over calibration text."""
