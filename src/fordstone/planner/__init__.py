"""What is decided about a plan before it runs: checks, split at the cut, push-down, task graph, guarantee, explain."""
