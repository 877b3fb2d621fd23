"""The agent on a gateway: the supervisor of the node process and its health."""
