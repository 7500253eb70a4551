"""Pickers of one pool that tell each other what only they know."""
