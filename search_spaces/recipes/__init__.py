"""Recipes: one choice on each axis, the named ones, and the rules between choices."""
