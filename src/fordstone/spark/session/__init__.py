"""The Spark session: Java, settings, shipping of this package to the workers."""
