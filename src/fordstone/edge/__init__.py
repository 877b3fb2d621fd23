"""The edge engine: tasks, channels, barriers, and the run from a checkpoint to the next."""
