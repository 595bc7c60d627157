"""A task of the lab."""
