"""Tables, timelines, buffers and the key index, and the backend that makes them."""
