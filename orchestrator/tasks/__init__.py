"""One file a verb: its options are checked once, its estimate decides how it is done, its record is what it gives."""
