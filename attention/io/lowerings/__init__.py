"""Stock formats that a plan can be lowered to, one file each."""
