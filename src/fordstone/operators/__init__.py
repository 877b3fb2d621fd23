"""The columnar operators, used by both engines."""
