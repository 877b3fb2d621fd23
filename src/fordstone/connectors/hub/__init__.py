"""The source of the center: the epochs that nodes have committed at a hub."""
