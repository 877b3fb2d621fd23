"""Queries in SQL: read into `syntax`, then built on the same streams that pipelines are written with.

`query.build` is what `Pipeline.sql` calls. Expressions are read by `lang.dialect` and nothing is pasted into text, so any
name is safe. What is not supported is refused where it is read, with its place.
"""
