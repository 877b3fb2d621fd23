"""The link of a node to its hub: outbox, sender, control tables, checkpoints at the hub."""
