"""What a run shows of itself while it runs and when it is over."""
