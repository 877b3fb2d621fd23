"""The SQL front end: text to a syntax tree. `fordstone.api.sql` builds streams from the tree."""
