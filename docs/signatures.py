"""A signature as a reader of the reference wants it: without self, over several lines where it is long."""

from __future__ import annotations

import ast
import re

from sources import Function

__all__ = ["call", "signature"]

MAX_LINE = 96


def signature(node: Function, *, prefix: str, name: str, is_method: bool) -> str:
    """`prefix name(arguments) -> result`; over several lines where it is long."""
    arguments = _arguments(node.args)[1 if is_method else 0 :]
    result = f" -> {ast.unparse(node.returns)}" if node.returns and name != "__init__" else ""
    return call(prefix + name, arguments, result)


def call(head: str, arguments: list[str], result: str) -> str:
    # Quotes as in the sources.
    arguments = [re.sub(r"'([^'\"]*)'", r'"\1"', argument) for argument in arguments]
    line = f"{head}({', '.join(arguments)}){result}"
    if len(line) <= MAX_LINE:
        return line
    return "\n".join([f"{head}(", *(f"    {argument}," for argument in arguments), f"){result}"])


def _arguments(args: ast.arguments) -> list[str]:
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    result = [_argument(*pair) for pair in zip(positional, defaults, strict=True)]
    if args.vararg:
        result.append(f"*{ast.unparse(args.vararg)}")
    elif args.kwonlyargs:
        result.append("*")
    result += [_argument(*pair) for pair in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    if args.kwarg:
        result.append(f"**{ast.unparse(args.kwarg)}")
    return result


def _argument(arg: ast.arg, default: ast.expr | None) -> str:
    text = ast.unparse(arg)
    if default is None:
        return text
    return (
        f"{text} = {ast.unparse(default)}" if arg.annotation else f"{text}={ast.unparse(default)}"
    )
