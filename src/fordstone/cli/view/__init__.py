"""What a running pipeline shows in a terminal."""
