"""What a grouping of the heads of a layer costs.

A part, one per file, is `f(site: Site, **knobs) -> Objective`. "whole_partition" in `needs` marks
an objective that only scores whole partitions; the others are additive over groups (`GroupCost`).
"""
