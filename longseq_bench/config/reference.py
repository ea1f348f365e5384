"""The configuration reference in Markdown, generated from the JSON Schema."""

from typing import Any

from longseq_bench.config.schema import config_schema

_HEAD = ["| Key | Value | Description |", "|---|---|---|"]


def config_reference() -> str:
    """Return Markdown tables of every key of a sweep file: values, unit, default, meaning."""
    schema = config_schema()
    workload = schema["$defs"]["WorkloadSection"]
    return "\n".join(
        [
            "## Keys of the file\n",
            *_table(schema["properties"]),
            "\n## Keys of `workload`\n",
            *_table(workload["properties"]),
            "\nA key with *list* takes one value or a list of values; a list is an axis of the "
            "grid. Every other key takes one value.\n",
        ]
    )


def _table(properties: dict[str, Any]) -> list[str]:
    rows = [
        f"| `{key}` | {_describe_values(value)} | {value['description']} |"
        for key, value in properties.items()
    ]
    return [*_HEAD, *rows]


def _describe_values(schema: dict[str, Any]) -> str:
    """Describe the values that a part of the schema accepts."""
    if "anyOf" in schema:
        parts = [_describe_values(part) for part in schema["anyOf"] if part.get("type") != "array"]
        is_axis = any(part.get("type") == "array" for part in schema["anyOf"])
        return ", ".join(dict.fromkeys(parts)) + (", *list*" if is_axis else "")
    if "enum" in schema:
        return ", ".join(f"`{'null' if word is None else word}`" for word in schema["enum"])
    if "$ref" in schema:
        return "name or mapping" if "Implementation" in schema["$ref"] else "mapping"
    if "examples" in schema:
        return f"text such as `{schema['examples'][0]}`"
    words = {"integer": "whole number", "boolean": "`true`, `false`", "null": "`null`"}
    word = words.get(schema["type"], schema["type"])
    if "minimum" in schema:
        return f"{word} from {schema['minimum']} to {schema['maximum']:,}"
    return f"{word} up to {schema['maximum']:,}" if "maximum" in schema else word
