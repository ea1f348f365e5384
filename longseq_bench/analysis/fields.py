"""Field declarations of typed rows: heading, kind, help and merge rule, each written once.

A row is a frozen dataclass whose fields are made with `declare`. Tables, filters, JSON documents
and data frames read the declarations back with `fields_of`.
"""

import dataclasses
from collections.abc import Collection
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

Kind = Literal[
    "text", "tokens", "bytes", "seconds", "flop_rate", "byte_rate", "share", "count", "ratio",
    "error", "flag", "list", "options",
]  # fmt: skip
"""The kind of quantity; it decides the unit, and the format for printing and parsing."""

Merge = Literal["same", "worst", "median", "largest", "each rank", "search", "derived"]
"""The rule that merges the values of several rounds and ranks into one.

same: equal in all of them.  worst: of the round with the most severe status.
median: over all iterations, each as slow as its slowest rank.
largest: over ranks and rounds.  each rank: a list in the order of ranks.
search: from all steps of a search.  derived: computed from other fields or other rows.
"""

Document = Literal["sweep", "search", "density"]
"""A JSON document that the command line prints."""

ALL_JSON: tuple[Document, ...] = ("sweep", "search", "density")
NO_JSON: tuple[Document, ...] = ()


@dataclasses.dataclass(frozen=True)
class Field:
    """The declaration of one field of a row.

    measurement: name of the measurement that gives the value, if there is one.
    json: the documents that `--json` prints it in.
    in_frame: a column of the pandas frame; False for a field that only a report can fill in.
    choices: allowed words of a Literal; empty for free text and numbers.
    """

    name: str
    heading: str
    kind: Kind
    help: str
    merge: Merge
    measurement: str
    json: Collection[Document]
    in_frame: bool
    choices: tuple[str, ...]


def declare(
    heading: str, kind: Kind, help: str, merge: Merge = "derived", *, measurement: str = "",
    json: Collection[Document] = ALL_JSON, in_frame: bool = True,
    default: Any = dataclasses.MISSING,
) -> Any:  # fmt: skip
    """Declare a field of a row dataclass; the arguments are those of Field.

    measurement defaults to the name of the field where the merge rule needs one.
    default: value of rows built without this field; a field without a default is required.
    """
    declaration = (heading, kind, help, merge, measurement, tuple(json), in_frame)
    return dataclasses.field(default=default, metadata={"declaration": declaration})


@cache
def fields_of(row_type: type) -> dict[str, Field]:
    """Return the declarations of a row class by field name, in order of declaration."""
    fields, types = {}, get_type_hints(row_type)
    for one in dataclasses.fields(row_type):
        heading, kind, help_text, merge, measurement, json, in_frame = one.metadata["declaration"]
        fields[one.name] = Field(
            one.name, heading, kind, help_text, merge, measurement or one.name, json, in_frame,
            _literals(types[one.name]),
        )  # fmt: skip
    return fields


def _literals(annotation: Any) -> tuple[str, ...]:
    """Return the words of a Literal, also of `Literal[...] | None`."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(word for part in get_args(annotation) for word in _literals(part))
