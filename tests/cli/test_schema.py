"""The JSON Schema of sweep files, and the reference made from it."""

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from docs.generate import generate_configuration
from longseq_bench.cli import run
from longseq_bench.config.schema import (
    SweepFile,
    WorkloadSection,
)

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "docs" / "reference" / "sweep.schema.json"
CONFIGS = sorted([*ROOT.glob("configs/*.yaml"), *ROOT.glob("results/**/config.yaml")])


@pytest.fixture(scope="module")
def published() -> Any:
    return json.loads(PUBLISHED.read_text())


def test_the_published_schema_is_what_the_command_prints(
    published: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Update it with `longseq schema --built-in > docs/reference/sweep.schema.json`."""
    assert run(["schema", "--built-in"]) == 0
    assert json.loads(capsys.readouterr().out) == published


def test_the_schema_accepts_every_config(published: Any) -> None:
    jsonschema.Draft202012Validator.check_schema(published)
    assert len(CONFIGS) > 7
    schema = jsonschema.Draft202012Validator(published)
    for path in CONFIGS:
        schema.validate(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize(
    "change",
    [
        {"tokns": "1k"},
        {"tokens": []},
        {"workload": {"dtype": "bfloat"}},
        {"memory_budget": "5 parsecs"},
        {"implementations": [{"ring": {"chnk": 1}}]},
        {"implementations": [{"ring": {"order": "zigzagg"}}]},
        {"implementations": [{"ring": {}, "sdpa": {}}]},
    ],
    ids=str,
)
def test_the_schema_refuses_what_the_loader_refuses(published: Any, change: dict[str, Any]) -> None:
    sound = {"tokens": ["1k", 2048], "implementations": ["sdpa", {"ring": {"chunk": ["1k", 512]}}]}
    schema = jsonschema.Draft202012Validator(published)  # `validate` would check it each time
    schema.validate(sound)
    with pytest.raises(jsonschema.ValidationError):
        schema.validate({**copy.deepcopy(sound), **change})


def test_every_key_is_described(published: Any) -> None:
    reference = generate_configuration()
    for properties in (
        published["properties"], published["$defs"]["WorkloadSection"]["properties"],
    ):  # fmt: skip
        for key, value in properties.items():
            assert value["description"].endswith("."), key
            assert f"| `{key}` |" in reference
    keys = {*SweepFile.model_fields, *WorkloadSection.model_fields}
    assert reference.count("\n| `") == len(keys)
    assert "| `time_cap` | number up to 31,536,000, text such as `500ms`, *list* |" in reference
    assert "Default: 2.0 s. |" in reference
