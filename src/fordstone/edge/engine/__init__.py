"""The edge engine: tasks, channels, gates, the coordinator, the writer and replay."""
