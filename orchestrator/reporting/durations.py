"""Seconds in words."""

from __future__ import annotations


def clock(seconds: float) -> str:
    """1:05:09, or 5:09 below an hour."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
