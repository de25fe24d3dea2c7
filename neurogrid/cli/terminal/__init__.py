"""The terminal that a person reads and types on: lines, tables, the panel, the text of an answer as it comes."""
