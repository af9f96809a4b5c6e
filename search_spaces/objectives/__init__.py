"""Objectives of a grouping: one file per part.

A part is `f(site: Site, **knobs) -> Objective`. "whole_partition" in `needs` marks an objective
that only scores whole partitions; the others are additive over groups (`GroupCost`).
"""
