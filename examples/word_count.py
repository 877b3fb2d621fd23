"""Count words, keep the counts up to date, and print them.

Run it:  fordstone example words && fordstone run examples/word_count.py --bounded
Spark:   the same with --on spark; it prints the same counts.
Result:  out/counts contains every change; `fordstone.connectors.latest("out/counts")` returns the newest count of each word.
"""

from fordstone import Pipeline
from fordstone.connectors import files, stdout

p = Pipeline("word-count")
lines = p.source("lines", files("in/words/*.jsonl"), schema={"line": "string"})
words = lines.flat_map("split(line, ' ') AS word").filter("word <> ''")
counts = words.group_by("word").agg(n="count(*)")
counts.sink("counts", files("out/counts", format="jsonl"))
counts.sink("shown", stdout())
