"""What a person sees and types: lines, tables, the panel, the text of an answer as it comes."""
