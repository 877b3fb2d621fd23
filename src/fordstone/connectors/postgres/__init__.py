"""PostgreSQL: tables as sinks, and as the tables of lookups. The package `psycopg` comes with an extra, and is imported where it is used."""
