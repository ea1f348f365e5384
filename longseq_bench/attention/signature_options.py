"""Options of an implementation, as its signature declares them.

An option is a keyword-only parameter, `chunk: Annotated[int, "tokens per step"] = 1024`; its name,
type, default and help come from this declaration. The minimum of a whole number is 1, or the number
in the annotation: `seed: Annotated[int, "of the draw", 0] = 0`. `Replaces` in it names an
option that has no meaning beside this one. A class may take those of another one, `options_of`,
without those in `left_out`.
"""

import inspect
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from longseq_bench.core.options import OptionKind, OptionSpec, Replaces


def specs_of(make: Callable[..., Any]) -> tuple[OptionSpec, ...]:
    """Return the options of a class or function: its keyword-only parameters, in order."""
    if inner := getattr(make, "options_of", None):
        left_out = getattr(make, "left_out", ())
        return tuple(spec for spec in specs_of(inner) if spec.name not in left_out)
    target = make.__init__ if inspect.isclass(make) else make
    hints = get_type_hints(target, include_extras=True)
    return tuple(
        spec_of(p.name, hints.get(p.name, str), p.default)
        for p in inspect.signature(target).parameters.values()
        if p.kind is inspect.Parameter.KEYWORD_ONLY
    )


def spec_of(name: str, hint: Any, default: Any) -> OptionSpec:
    """Return the option that a parameter with this type and default is.

    Raises KeyError for a type that an option can't have.
    """
    extras: list[Any] = []
    optional = False
    while (origin := get_origin(hint)) in (Annotated, Union, types.UnionType):
        if origin is Annotated:
            hint, *more = get_args(hint)
            extras += more
        else:
            optional = type(None) in get_args(hint)
            (hint,) = (a for a in get_args(hint) if a is not type(None))
    choices: tuple[str, ...] = ()
    if origin is Literal:
        words = get_args(hint)
        hint = type(words[0])
        choices = words if hint is str else ()
    kinds: dict[Any, OptionKind] = {int: "int", float: "float", bool: "bool", str: "str"}
    kind: OptionKind = "ints" if get_origin(hint) is tuple else kinds[hint]
    value = None if default is inspect.Parameter.empty else default
    return OptionSpec(
        name=name,
        kind=kind,
        default=value,
        optional=optional,
        choices=choices,
        least=next((e for e in extras if isinstance(e, int)), 1),
        help=" ".join(e for e in extras if isinstance(e, str)),
        replaces=next((e for e in extras if isinstance(e, Replaces)), None),
    )
