"""The service between nodes and center: messages, client, server and store."""
