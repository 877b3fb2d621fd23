"""Pure decisions: facts in, decision out."""
