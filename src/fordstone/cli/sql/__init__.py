"""`fordstone sql`."""
