"""Sources whose input is pushed to them, and is journalled before it is acknowledged."""
