"""The `fordstone*` data sources for anybody's Spark job."""
