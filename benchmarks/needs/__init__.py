"""What conversions, searches and texts need in memory, time and disk, measured against what is said of them."""
