"""Count words from topic to topic: the newest count of each word is in the topic, once, whatever is killed meanwhile.

Needs:   pip install 'fordstone[kafka]', and a broker (KAFKA_SERVERS, by default localhost:9092) with the topics `lines` and `counts`.
Run it:  fordstone run examples/kafka_word_count.py, or with --bounded to stop at the end of what is there.
Spark:   the same with --on spark.
Result:  messages of `counts` such as {"word":"ford","n":3,"__op":"upsert"}, with the word as their key. Read them with
         isolation.level=read_committed.
"""

import os

from fordstone import Pipeline
from fordstone.connectors import kafka

servers = os.environ.get("KAFKA_SERVERS", "localhost:9092")

p = Pipeline("kafka-word-count")
lines = p.source("lines", kafka("lines", servers=servers, format="raw"), schema={"line": "string"})
words = lines.flat_map("split(line, ' ') AS word").filter("word <> ''")
counts = words.group_by("word").agg(n="count(*)")
counts.sink("counts", kafka("counts", servers=servers, key="word"))
