"""Files as source and sink: JSON lines, CSV, Parquet and Arrow."""
