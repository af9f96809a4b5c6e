"""Engines that serve exported models, each run in a process of its own: what they compute, and the cache they hold."""
