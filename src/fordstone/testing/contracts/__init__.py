"""Contract suites: what every implementation of a seam must keep, as pytest classes to derive from."""
