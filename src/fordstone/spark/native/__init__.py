"""Native lowering to Spark SQL."""
