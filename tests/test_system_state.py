"""Settings of the system, read below a root that a test fills."""

from pathlib import Path

import pytest

from longseq_bench.environment import Finding, examine_system

CPU = "sys/devices/system/cpu"
PAGES = "sys/kernel/mm/transparent_hugepage/enabled"


def state(root: Path, name: str, files: dict[str, str]) -> Finding:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n")
    (found,) = [one for one in examine_system(root) if one.name == name]
    return found


def test_nothing_is_guessed_where_nothing_is_visible(tmp_path: Path) -> None:
    found = examine_system(tmp_path)
    assert [one.state for one in found] == ["ok"] * 2
    assert all("not visible here" in one.found for one in found)


@pytest.mark.parametrize(
    ("name", "files", "state_", "words"),
    [
        ("cpu governor", {f"{CPU}/cpu{i}/cpufreq/scaling_governor": "performance" for i in (0, 1)},
         "ok", "performance on 2 CPUs"),
        ("cpu governor", {f"{CPU}/cpu0/cpufreq/scaling_governor": "powersave"},
         "note", "the clock follows the load with a delay"),
        ("transparent huge pages", {PAGES: "always [madvise] never"}, "ok", "asks for it"),
        ("transparent huge pages", {PAGES: "[always] madvise never"}, "note", "steps"),
    ],
)  # fmt: skip
def test_each_finding_says_what_it_changes(
    name: str, files: dict[str, str], state_: str, words: str, tmp_path: Path
) -> None:
    found = state(tmp_path, name, files)
    assert found.state == state_
    assert words in f"{found.found} {found.remedy}"
    assert bool(found.remedy) == (state_ == "note")
