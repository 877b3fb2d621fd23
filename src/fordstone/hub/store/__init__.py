"""What a hub keeps: the log of epochs, streams, control tables, blobs, and their retention."""
