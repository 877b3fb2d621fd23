"""Requests that come in as a source, and requests that go out as a sink."""
