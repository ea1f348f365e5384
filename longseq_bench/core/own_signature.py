"""The signature of a function, read from its source: nothing of the user's is executed.

The first three positional parameters take q, k and v. Later parameters are passed by keyword: those
of workload_arguments.py by longseq, the others are options.
"""

import ast
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from longseq_bench.core.errors import UserError, nearest
from longseq_bench.core.options import OptionSpec, spec_of
from longseq_bench.core.workload_arguments import NAMES

TENSORS = 3
"""Positional parameters: q, k and v."""

_PLAIN: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str}
_UNKNOWN = object()
"""Stands for a default or a type that can't be read without running code."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Signature:
    """The signature of an own function.

    line: of its definition.  takes: the parameters that longseq passes.  options: those that the
    user sets.  summary: first line of the docstring.
    """

    line: int
    takes: frozenset[str]
    options: tuple[OptionSpec, ...]
    summary: str


@dataclass(frozen=True)
class _Parameter:
    name: str
    annotation: ast.expr | None
    default: ast.expr | None


def read_signature(content: bytes, file: str, function: str) -> Signature:
    """Return the signature of a function in Python source.

    Raises UserError for source that can't be parsed, a function that is not defined there, or one
    that can't be called with q, k and v.
    """
    try:
        tree = ast.parse(content, file)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UserError(f"{file}:{line}: not valid Python: {reason}") from None
    node = _find(tree, file, function)
    _check_tensors(node, file)
    parameters = list(_keyword_parameters(node))
    options = []
    for parameter in parameters:
        if parameter.name in NAMES:
            continue
        if parameter.default is None:
            raise UserError(
                f"{file}:{node.lineno}: {function} needs an argument `{parameter.name}`, which "
                f"longseq does not pass; give it a default (it passes {', '.join(NAMES)})"
            )
        if spec := _read_option(parameter):
            options.append(spec)
    return Signature(
        line=node.lineno,
        takes=frozenset(p.name for p in parameters) & frozenset(NAMES),
        options=tuple(options),
        summary=(ast.get_docstring(node) or "").partition("\n")[0].rstrip("."),
    )


# ---- the definition ----------------------------------------------------------------------------


def _find(tree: ast.Module, file: str, function: str) -> _Function:
    """Return the last definition of a function at the top level of a module."""
    found: ast.stmt | None = None
    functions: list[str] = []
    for statement in _top_level(tree.body):
        if isinstance(statement, _Function):
            functions.append(statement.name)
        if function in _names(statement):
            found = statement
    if isinstance(found, ast.FunctionDef):
        return found
    if found is None:
        close = nearest(function, functions)
        has = f"it has {', '.join(functions)}" if functions else "it defines no function"
        hint = f"did you mean {close!r}?" if close else has
        raise UserError(f"{file} has no function {function!r}; {hint}")
    where = f"{file}:{found.lineno}: {function}"
    if isinstance(found, ast.ClassDef):
        raise UserError(
            f"{where} is a class; name a function, or make a plug-in (docs/extending.md)"
        )
    if isinstance(found, ast.AsyncFunctionDef):
        raise UserError(f"{where} is async; define it with def")
    raise UserError(
        f"{where} is not defined by def here, so its arguments can't be read; define it with def, "
        "or name the file that does"
    )


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, also those below if, try and with."""
    for statement in body:
        yield statement
        for inner in ("body", "orelse", "finalbody"):
            if isinstance(statement, ast.If | ast.Try | ast.With):
                yield from _top_level(getattr(statement, inner, []))
        for handler in getattr(statement, "handlers", []):
            yield from _top_level(handler.body)


def _names(statement: ast.stmt) -> set[str]:
    """Return the names that a statement defines."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return {statement.name}
        case ast.Assign() | ast.AnnAssign():
            targets = getattr(statement, "targets", None) or [statement.target]  # type: ignore[union-attr]
            return {target.id for target in targets if isinstance(target, ast.Name)}
        case ast.Import() | ast.ImportFrom():
            return {alias.asname or alias.name for alias in statement.names}
    return set()


def _check_tensors(node: _Function, file: str) -> None:
    """Raise UserError if q, k and v can't be passed by position, or something else must be."""
    positional = [*node.args.posonlyargs, *node.args.args]
    where = f"{file}:{node.lineno}: {node.name}"
    if len(positional) < TENSORS:
        names = ", ".join(a.arg for a in positional) or "none"
        raise UserError(
            f"{where} has {len(positional)} positional parameters ({names}); the first three must "
            "take q, k and v"
        )
    required = len(positional) - len(node.args.defaults)
    for extra in node.args.posonlyargs[TENSORS : max(TENSORS, required)]:
        raise UserError(
            f"{where} needs the positional argument `{extra.arg}`; longseq passes only q, k and v "
            "by position, so give it a default"
        )


def _keyword_parameters(node: _Function) -> Iterator[_Parameter]:
    """Yield the parameters after q, k and v that can be passed by keyword."""
    args = node.args
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + [*args.defaults]
    first = max(TENSORS, len(args.posonlyargs))
    later = zip(positional[first:], defaults[first:], strict=True)
    for parameter, default in [*later, *zip(args.kwonlyargs, args.kw_defaults, strict=True)]:
        yield _Parameter(parameter.arg, parameter.annotation, default)


# ---- options -----------------------------------------------------------------------------------


def _read_option(parameter: _Parameter) -> OptionSpec | None:
    """Return the option that a parameter is; None if its type or default needs running code.

    Such a parameter keeps its default.
    """
    assert parameter.default is not None
    default = _literal(parameter.default)
    if default is _UNKNOWN or not isinstance(default, bool | int | float | str | tuple | None):
        return None
    hint = _read_type(parameter.annotation) if parameter.annotation else _type_of(default)
    hint = _type_of(default) if hint is _UNKNOWN else hint
    if hint is _UNKNOWN:
        return None
    if default is None:
        hint = _or_none(hint)
    try:
        spec = spec_of(parameter.name, hint, default)
    except (KeyError, TypeError, ValueError):
        return None
    is_small = isinstance(default, int) and not isinstance(default, bool) and default <= 0
    return spec.model_copy(update={"least": 0}) if spec.kind == "int" and is_small else spec


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return _UNKNOWN


def _type_of(default: Any) -> Any:
    if isinstance(default, tuple):
        return tuple[int, ...] if all(type(x) is int for x in default) else _UNKNOWN
    return type(default) if type(default) in _PLAIN.values() else _UNKNOWN


def _read_type(node: ast.expr) -> Any:
    """Return the type that an annotation names, as far as an option can have it."""
    match node:
        case ast.Constant(value=str(text)):
            try:
                return _read_type(ast.parse(text, mode="eval").body)
            except SyntaxError:
                return _UNKNOWN
        case ast.Constant(value=None):
            return type(None)
        case ast.Name(id=name):
            return _PLAIN.get(name, _UNKNOWN)
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            sides = [_read_type(side) for side in (left, right)]
            known = [side for side in sides if side is not type(None)]
            return _or_none(known[0]) if len(known) == 1 else _UNKNOWN
        case ast.Subscript(value=value, slice=inner):
            return _read_generic(value, inner)
    return _UNKNOWN


def _read_generic(value: ast.expr, inner: ast.expr) -> Any:
    """Return the type of Literal[...], Optional[...], Annotated[...] or tuple[int, ...]."""
    name = value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", "")
    parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
    if name == "Literal":
        return _literal_type([_literal(part) for part in parts])
    if name == "Optional":
        return _or_none(_read_type(inner))
    if name == "Annotated":
        extras = [x for x in map(_literal, parts[1:]) if isinstance(x, str | int)]
        return _annotated(_read_type(parts[0]), extras)
    if name in ("tuple", "Tuple") and _read_type(parts[0]) is int:
        return tuple[int, ...]
    return _UNKNOWN


def _literal_type(values: list[Any]) -> Any:
    """Return the type of Literal[...]: of words a choice, of numbers any number."""
    kinds = {type(value) for value in values}
    if kinds == {str}:
        return Literal.__getitem__(tuple(values))
    return kinds.pop() if len(kinds) == 1 and kinds <= {*_PLAIN.values()} else _UNKNOWN


def _annotated(hint: Any, extras: Sequence[Any]) -> Any:
    if hint is _UNKNOWN or not extras:
        return hint
    return operator.getitem(Annotated, (hint, *extras))


def _or_none(hint: Any) -> Any:
    if get_origin(hint) is Annotated:
        inner, *extras = get_args(hint)
        return _annotated(inner | None, extras)
    return hint if hint is _UNKNOWN else hint | None
