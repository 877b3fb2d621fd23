"""The commit log of a node: manifests, runs, the checkpoint store, the epoch log and copies."""
