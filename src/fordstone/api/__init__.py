"""Declaring pipelines."""
