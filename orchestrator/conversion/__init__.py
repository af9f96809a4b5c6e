"""Conversions without a search: request, estimate, stores of layers, record."""
