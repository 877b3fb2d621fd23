"""A plant: readings from Kafka, places from PostgreSQL, totals per site in PostgreSQL, and alarms in Kafka, each row once.

Needs:   pip install 'fordstone[kafka,postgres,rocksdb]'; a broker (KAFKA_SERVERS, by default localhost:9092) with the topics `readings` and
         `alarms`; and a database that the usual variables (PGHOST, PGDATABASE, PGUSER, PGPASSWORD) name, with a table
         devices (device text, site text).
Run it:  fordstone run examples/plant.py, or with --bounded to stop at the end of what is there.
Spark:   the same with --on spark.
Result:  the tables `totals`, with one row per site, and `warmest`, with one row per device; messages of `alarms` such as
         {"device":"d1","temp":31.5,"site":"north"}. A device that moves to another site counts there within ten seconds.
"""

import os

from fordstone import Pipeline
from fordstone.connectors import kafka, postgres

servers = os.environ.get("KAFKA_SERVERS", "localhost:9092")

# State is in RocksDB, so there may be more devices than fit into memory.
p = Pipeline("plant", state="rocksdb")
readings = p.source("readings", kafka("readings", servers=servers), schema={"device": "string", "temp": "double"})
devices = {"device": "string", "site": "string"}
placed = readings.lookup(postgres("devices"), on="device", schema=devices, refresh="10s")
placed.group_by("site").agg(n="count(*)").sink("totals", postgres("totals"))
placed.group_by("device").agg(warmest="max(temp)").sink("warmest", postgres("warmest"))
placed.filter("temp > 30").sink("alarms", kafka("alarms", servers=servers, key="device"))
