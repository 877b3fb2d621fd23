"""Aggregates by window: tumbling, sliding, session and count windows."""
