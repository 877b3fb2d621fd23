"""What a plan is: steps, windows, stream types and ids. Frozen values, stored as JSON."""
