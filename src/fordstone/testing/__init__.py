"""The public test kit: contract suites for connectors and state, and a disk in memory."""
