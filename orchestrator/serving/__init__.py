"""Engines that serve exported models, each run in a separate process.

Here is what they compute, and the cache they hold.
"""
