"""Protobuf: .proto texts, and the values of messages, through the package `protobuf`."""
