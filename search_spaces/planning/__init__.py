"""Make a plan of a recipe and a ratio, with the measurements that this needs."""
