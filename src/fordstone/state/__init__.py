"""Tables, runs and buffers, used by both engines."""
