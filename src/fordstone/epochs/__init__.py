"""The commit log of a node: manifests, runs, the checkpoint store, copies and recovery."""
