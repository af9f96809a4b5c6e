"""What a grouping optimises: one file a part.

A part is `f(site: Site, **knobs) -> Objective`. "whole_partition" in `needs` marks an objective
that only scores whole partitions; the others are additive over groups (`GroupCost`).
"""
