"""Keyed functions of the user, with state and timers."""
