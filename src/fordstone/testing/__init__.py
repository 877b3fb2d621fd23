"""The public test kit: simulator, fault injection, oracles, contract suites."""
