"""Grammars: which tokens may come next, so that an answer is JSON, fits a schema, or is a call of a tool.

What a grammar says is text (`grammar_text`); llguidance compiles it and computes masks, each of which is a function of
the tokens before it. It is imported when the first grammar is compiled.
"""

from neurogrid.model.grammars.compiler import GrammarBusyError, GrammarCompiler
from neurogrid.model.grammars.grammar_state import Grammar, GrammarState
from neurogrid.model.grammars.grammar_text import (
    MAX_SCHEMA_BYTES,
    MAX_SCHEMA_DEPTH,
    GrammarText,
    check_schema,
)

__all__ = [
    "MAX_SCHEMA_BYTES",
    "MAX_SCHEMA_DEPTH",
    "Grammar",
    "GrammarBusyError",
    "GrammarCompiler",
    "GrammarState",
    "GrammarText",
    "check_schema",
]
