"""Memory, time and disk that conversions, searches and texts need, measured against the estimates."""
