"""The client of a hub."""
