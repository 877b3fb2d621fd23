"""Patterns over the rows of one key (CEP)."""
