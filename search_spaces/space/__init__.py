"""The joint space of recipes that searchers draw from."""
