"""Mergeable partial aggregates, the running aggregate, and the combiner below the cut."""
