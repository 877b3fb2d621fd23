"""Checkpoints on disk: store layout, writing, reading, verifying, merging, uploading."""
