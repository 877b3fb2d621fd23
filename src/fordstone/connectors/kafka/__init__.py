"""Apache Kafka: topics as sources and sinks. Works with what speaks its protocol, through the package `confluent-kafka`."""
