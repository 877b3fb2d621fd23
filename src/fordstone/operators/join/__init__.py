"""Interval joins and look-ups."""
