"""A checkpoint one decoder layer at a time.

Windows that run a layer alone, and what is measured through them.
"""
