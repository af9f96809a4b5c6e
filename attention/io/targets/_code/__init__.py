"""Python files that are copied into exports.

They are read by people and run by engines, without Headfold.
"""
