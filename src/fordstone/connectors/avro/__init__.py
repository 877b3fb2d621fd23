"""Apache Avro: schemas, and the binary values of messages, decoded and encoded column by column. Needs no further package."""
