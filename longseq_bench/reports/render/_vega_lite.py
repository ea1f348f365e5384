"""Vega-Lite as plain data, with the names of Altair: channels, marks, layers.

Altair copies a chart and checks it against a schema at each step, 80 ms for one chart. Here a chart
takes 1 ms; a test checks charts against that schema instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.4.1.json"
TYPES = {"N": "nominal", "O": "ordinal", "Q": "quantitative"}
Undefined: Any = object()
"""The value of a property that is left out; None is written as null."""


class Part:
    """Properties of a part of a chart, which are attributes."""

    def __init__(self, **properties: Any) -> None:
        vars(self).update(properties)

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)[name] = value

    def to_dict(self) -> dict[str, Any]:
        """Return plain dictionaries and lists, without undefined properties."""
        return {name: _plain(one) for name, one in vars(self).items() if one is not Undefined}


class Channel(Part):
    """An encoding: "time:Q" is a field and its type."""

    def __init__(self, shorthand: str, **properties: Any) -> None:
        field, _, kind = shorthand.rpartition(":")
        super().__init__(field=field, type=TYPES[kind], **properties)


Axis = Part
ExprRef = Part
NamedData = Part
Scale = Part
Color = Channel
Fill = Channel
Shape = Channel
Tooltip = Channel
X = Channel
Y = Channel
YOffset = Channel


def value(constant: Any) -> Part:
    """Return an encoding with a constant value (px)."""
    return Part(value=constant)


def param(name: str, value: Any) -> Part:
    """Return a named variable of a chart."""
    return Part(name=name, value=value)


def selection_interval(name: str, bind: str, zoom: str) -> Part:
    """Return a parameter that is changed by dragging, and by events of the mouse wheel."""
    return Part(name=name, select=Part(type="interval", zoom=zoom), bind=bind)


class Chart:
    """A chart, or one layer of it. Methods return a changed copy."""

    def __init__(self, data: Part | None = None, **parts: Any) -> None:
        self.parts = parts if data is None else {"data": data, **parts}

    def properties(self, **parts: Any) -> Chart:
        """Set parts such as width and title."""
        return Chart(**{**self.parts, **parts})

    def encode(self, **channels: Any) -> Chart:
        """Add encodings by channel."""
        added = {name: _channel(name, one) for name, one in channels.items()}
        return self.properties(encoding={**self.parts.get("encoding", {}), **added})

    def transform_filter(self, test: str) -> Chart:
        """Keep the rows that pass a test."""
        return self.properties(transform=[*self.parts.get("transform", ()), {"filter": test}])

    def add_params(self, *params: Part) -> Chart:
        """Add variables that the chart's expressions use."""
        return self.properties(params=[*self.parts.get("params", ()), *params])

    def __getattr__(self, name: str) -> Callable[..., Chart]:
        """Return mark_bar(**style), configure_title(**style), and so on."""
        verb, _, part = name.partition("_")
        if verb == "mark":
            return lambda **style: self.properties(mark={"type": part, **style})
        if verb == "configure":
            config = self.parts.get("config", {})
            return lambda **style: self.properties(config={**config, part: style})
        raise AttributeError(name)

    def to_dict(self) -> dict[str, Any]:
        """Return the chart as Vega-Lite."""
        return {"$schema": SCHEMA, **Part(**self.parts).to_dict()}


def layer(*charts: Chart) -> Chart:
    """Draw charts over each other. Their variables become those of the whole chart."""
    layers, params = [], []
    for i, chart in enumerate(charts, 1):
        parts, name = dict(chart.parts), f"view_{i}"
        if own := parts.pop("params", ()):
            parts["name"] = name
            params += [Part(**vars(one), views=[name]) for one in own]
        layers.append(parts)
    return Chart(layer=layers).add_params(*params)


def _channel(name: str, given: Any) -> Any:
    if name in ("x2", "y2"):  # the other end of x or y, of the same type
        return {"field": given.partition(":")[0]}
    return Channel(given) if isinstance(given, str) else given


def _plain(given: Any) -> Any:
    if isinstance(given, Part | dict):
        return (given if isinstance(given, Part) else Part(**given)).to_dict()
    return [_plain(one) for one in given] if isinstance(given, list | tuple) else given
