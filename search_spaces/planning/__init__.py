"""From a recipe and a ratio to a plan, and what is measured and kept on the way."""
