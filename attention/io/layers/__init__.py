"""A checkpoint one decoder layer at a time: windows that run a layer alone, and what is measured through them."""
