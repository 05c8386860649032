"""A plan on running engines -> observations; no opinion."""
