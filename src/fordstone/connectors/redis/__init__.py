"""Streams of Redis as sources and sinks."""
