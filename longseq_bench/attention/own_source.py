"""Functions of the user, in a child: found, imported, and read by `inspect.signature`.

`path/to/file.py:function` and `package.module:function` name one, and so does a pickle that
api/implementations.py wrote. The first three positional parameters take q, k and v. Later
parameters are passed by keyword: NAMES by longseq, the others are options. The parent imports
nothing of a user: it asks a child for this description (`catalogue` in worker/main.py).
"""

import hashlib
import importlib
import importlib.util
import inspect
import os
import pickle
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, get_type_hints

from longseq_bench.attention.signature_options import spec_of
from longseq_bench.core.errors import UserError, nearest
from longseq_bench.core.model import Workload
from longseq_bench.core.options import OptionSpec
from longseq_bench.core.registry import FORM, PICKLE, is_path

GROUP = "group"
"""The parameter for torch's process group of all ranks; None on one rank."""

ATTN_MASK, MASK_MOD = "attn_mask", "mask_mod"
"""The parameters for a mask: booleans (queries, keys) as in torch's scaled_dot_product_attention,
or a function of batch, head, query and key as in FlexAttention; None for a full or causal one."""


def _needs_causal(w: Workload) -> bool:
    """Return False for one new token, which sees the whole cache, and where a mask is passed."""
    return w.causal and w.mask is None and w.new_tokens != 1


_NEEDS: dict[tuple[str, ...], tuple[str, Callable[[Workload, int], bool]]] = {
    ("causal", "is_causal"): ("a causal mask", lambda w, ranks: _needs_causal(w)),
    (ATTN_MASK, MASK_MOD): (
        "a mask that is neither full nor causal",
        lambda w, ranks: bool(w.mask),
    ),
    ("new_tokens",): ("decoding with more than one new token", lambda w, ranks: w.new_tokens > 1),
    ("enable_gqa", "grouped_heads"): (
        "fewer kv_heads than heads",
        lambda w, ranks: w.kv_heads != w.heads,
    ),
    ("sinks",): ("a sink in each head", lambda w, ranks: w.sink),
    ("soft_cap",): ("a soft cap of the scores", lambda w, ranks: w.soft_cap is not None),
    (GROUP,): ("several ranks", lambda w, ranks: ranks > 1),
    ("scale",): ("a latent, whose scale is the model's", lambda w, ranks: bool(w.latent)),
}
"""Parameters of which a function needs one, what needs it, and when."""

NAMES = (*(name for names in _NEEDS for name in names), "rank", "world_size")
"""All parameters that longseq passes itself; any other one is an option."""


def missing_reasons(
    function: str, taken: Collection[str], workload: Workload | None = None, ranks: int = 1
) -> list[str]:
    """Return why a function with some of the parameters can't compute a workload; None: any."""
    return [
        f"{function} takes no argument `{names[0]}`, needed for {need}"
        for names, (need, is_needed) in _NEEDS.items()
        if not {*names} & {*taken} and (workload is None or is_needed(workload, ranks))
    ]


def passed_values(
    taken: Collection[str], workload: Workload, rank: int, ranks: int
) -> dict[str, Any]:
    """Return the values of the parameters that a function takes, by name.

    The caller puts the group, the mask and the sinks in the place of None.
    """
    w, grouped = workload, workload.kv_heads != workload.heads
    values: dict[str, Any] = dict.fromkeys(("causal", "is_causal"), _needs_causal(w))
    values |= dict.fromkeys(("enable_gqa", "grouped_heads"), grouped)
    values |= {"new_tokens": w.new_tokens, "scale": w.scale, "soft_cap": w.soft_cap}
    values |= {"rank": rank, "world_size": ranks}
    return {name: values.get(name) for name in NAMES if name in taken}


_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

files: dict[str, str] = {}
"""Files of own functions that were imported here, or failed to be, as the user names them."""


@dataclass(frozen=True)
class OwnFile:
    """The file of an own function.

    name: as in a trial.  function: its own name.  module: dotted name, or None if the user named a
    file.  source: 16 hex digits, the hash of the file's bytes; of a pickle that of the source.
    """

    name: str
    function: str
    file: Path
    module: str | None
    source: str


@dataclass(frozen=True)
class OwnFunction:
    """A function of the user.

    place: file and line of its definition: "my_attention.py:12".  pattern: see own_function.py.
    takes: the parameters that longseq passes.  options: those that the user sets.
    summary: first line of the docstring, or the name.
    """

    call: Callable[..., Any]
    place: str
    pattern: Callable[..., Any] | None
    takes: frozenset[str]
    options: tuple[OptionSpec, ...]
    summary: str


def find_file(name: str) -> OwnFile:
    """Return the file of an own function. Raises UserError if there is none."""
    place, _, function = name.rpartition(":")
    if not place or not function.strip().isidentifier():
        written = name if name.endswith(".py") else (place or "path/to/file.py")
        raise UserError(
            f"implementation {name!r} names no function; write {written.strip(':')}:FUNCTION"
        )
    module = None if is_path(place) else place
    file = _find_module(module, name) if module else Path(place)
    try:
        content = file.read_bytes()
    except OSError as error:
        close = nearest(file.name, [path.name for path in file.parent.glob("*.py")])
        hint = f"; did you mean {file.parent / close}?" if close and not file.exists() else ""
        raise UserError(
            f"{file} (implementation {name}) can't be read: {error.strerror}{hint}"
        ) from None
    if file.suffix == PICKLE:
        source = file.stem.rpartition("-")[2]
    else:
        source = hashlib.sha256(content).hexdigest()[:16]
    return OwnFile(name, function.strip(), file, module, source)


def _find_module(module: str, name: str) -> Path:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        spec = importlib.util.find_spec(module)
    except (ModuleNotFoundError, ValueError):  # of a package around it, or of two dots in a row
        spec = None
    if spec is None or not (spec.origin or "").endswith(".py"):
        raise UserError(
            f"there is no module {module} with Python source (implementation {name}) on Python's "
            f"path or in {os.getcwd()}; {FORM}"
        )
    return Path(str(spec.origin))


def import_function(own: OwnFile) -> OwnFunction:
    """Import a user's function and read its signature.

    Raises UserError for a function that is not there or that can't be called with q, k and v, and
    whatever the file raises when it is imported.
    """
    files[os.path.realpath(own.file)] = str(own.file)
    if own.file.suffix == PICKLE:
        module = None
        function, file = pickle.loads(own.file.read_bytes())
        files[os.path.realpath(inspect.unwrap(function).__code__.co_filename)] = file
    else:
        module = _import(own)
        function = getattr(module, own.function, None)
        if function is None:
            names = [n for n, f in vars(module).items() if f.__class__ is FunctionType]
            close, defined = nearest(own.function, names), ", ".join(names) or "no function"
            hint = f"did you mean {close!r}?" if close else f"it defines {defined}"
            raise UserError(f"{own.file} has no function {own.function!r}; {hint}")
    code = getattr(inspect.unwrap(function), "__code__", None)
    file, line = (code.co_filename, code.co_firstlineno) if code else (str(own.file), 1)
    place = f"{files.setdefault(os.path.realpath(file), file)}:{line}"
    # the pattern of the function, which may be None, else that of its module
    pattern = getattr(function, "pattern", getattr(module, "pattern", None))
    pattern = pattern if callable(pattern) and pattern is not function else None
    return _describe(own.function, function, pattern, place)


def _import(own: OwnFile) -> ModuleType:
    """Import a file; its folder is on Python's path, after all others."""
    if own.module:
        return importlib.import_module(own.module)
    folder = str(own.file.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    name = f"longseq_own_{own.source}"
    spec = importlib.util.spec_from_file_location(name, own.file)
    if spec is None or spec.loader is None:
        raise UserError(f"{own.file} is no Python file; {FORM}")
    module = importlib.util.module_from_spec(spec)
    # dataclasses, pickle and torch.compile look a module up by its name
    sys.modules[name] = module
    # a cache of bytecode is not renewed by an edit of equal length within a second
    code = compile(own.file.read_bytes(), str(own.file), "exec", dont_inherit=True)
    exec(code, module.__dict__)
    return module


def _describe(name: str, function: Any, pattern: Any, place: str) -> OwnFunction:
    try:
        parameters = [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):
        parameters = None
    if parameters is None or inspect.isclass(function) or inspect.iscoroutinefunction(function):
        raise UserError(
            f"{place}: {name} is no function made with def; name one, or make a plug-in "
            "(docs/extending.md)"
        )
    tensors = [p for p in parameters if p.kind < inspect.Parameter.VAR_POSITIONAL][:3]
    if len(tensors) < 3:  # q, k and v
        names = ", ".join(p.name for p in tensors) or "none"
        raise UserError(
            f"{place}: {name} has {len(tensors)} positional parameters ({names}); the first three "
            "must take q, k and v"
        )
    by_keyword = [p for p in parameters if p not in tensors and p.kind in _BY_KEYWORD]
    for parameter in by_keyword:
        if parameter.default is inspect.Parameter.empty and parameter.name not in NAMES:
            raise UserError(
                f"{place}: {name} needs an argument `{parameter.name}`, which longseq does not "
                f"pass; give it a default (it passes {', '.join(NAMES)})"
            )
    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception:  # a name in an annotation that is not defined, for example
        hints = {}
    options = (_option(p, hints.get(p.name)) for p in by_keyword if p.name not in NAMES)
    return OwnFunction(
        function,
        place,
        pattern,
        takes=frozenset(p.name for p in by_keyword) & frozenset(NAMES),
        options=tuple(option for option in options if option),
        summary=(inspect.getdoc(function) or name).partition("\n")[0].rstrip("."),
    )


def _option(parameter: inspect.Parameter, hint: Any) -> OptionSpec | None:
    """Return the option that a parameter is; None if no option can have its type.

    Such a parameter keeps its default.
    """
    default = parameter.default
    of_default = tuple[int, ...] if isinstance(default, tuple) else type(default)
    for kind in (hint, of_default):
        try:
            spec = spec_of(parameter.name, kind | None if default is None else kind, default)
        except (KeyError, TypeError, ValueError):
            continue
        is_small = type(default) is int and default <= 0
        return spec.model_copy(update={"least": 0}) if spec.kind == "int" and is_small else spec
    return None
