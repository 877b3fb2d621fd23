"""Delta tables: a sink. The package `deltalake` comes with an extra, and is imported where it is used."""
