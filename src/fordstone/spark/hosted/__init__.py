"""Hosts the operators of `fordstone.operators` in Spark Structured Streaming."""
