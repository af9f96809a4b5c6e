"""Engines that serve exported models, each run in a process of its own.

Here is what they compute, and the cache they hold.
"""
