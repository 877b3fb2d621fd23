"""Lowering of checked expressions to Polars, with the meaning that `fordstone.lang` defines."""
