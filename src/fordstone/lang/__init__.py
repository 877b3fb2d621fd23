"""The expression language: types, checking, functions, and what each expression means. No I/O, no clock."""
