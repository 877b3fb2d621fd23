"""One server of each kind per test run, started when the first test asks for it. Fault tests that end servers start their own."""
