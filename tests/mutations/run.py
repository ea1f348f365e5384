"""Apply each fault to a copy of the tree and run the tests that must turn red.

    python -m tests.mutations.run                      # all of them
    python -m tests.mutations.run --under search
    python -m tests.mutations.run --only torn-line --only verdict

Exit code 0 where every fault was found, 1 where a fault stayed green, 2 where a fault no
longer fits the source (its text is not found exactly once).
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.mutations.faults import FAULTS, PACKAGE, Fault

ROOT = Path(__file__).parents[2]
LIMIT_S = 600
TAIL_LINES = 15


def copy_tree(target: Path) -> None:
    """Copy every file that git tracks or does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def find_misplaced(faults: Sequence[Fault]) -> list[str]:
    """Return a line for each fault whose text does not occur exactly once in its file."""
    found = []
    for fault in faults:
        path = ROOT / PACKAGE / fault.file
        count = path.read_text().count(fault.old) if path.exists() else None
        if count != 1:
            why = "no such file" if count is None else f"its text occurs {count} times"
            found.append(f"{fault.id}: {fault.file}: {why}")
        found += [f"{fault.id}: no test {t}" for t in fault.tests if not _exists(t)]
    return found


def _exists(node: str) -> bool:
    path, _, inside = node.partition("::")
    text = (ROOT / path).read_text() if (ROOT / path).is_file() else ""
    names = (f"def {inside.partition('::')[0]}", f"class {inside.partition('::')[0]}")
    return any(name in text for name in names) if inside else (ROOT / path).exists()


def run_tests(
    tree: Path, nodes: Sequence[str], *more: str, **options: Any
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts="]
    # a changed file may have the size and the second of the sound one
    variables = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([*command, *more, *nodes], cwd=tree, env=variables, text=True, **options)


def run_fault(tree: Path, fault: Fault) -> tuple[bool, str]:
    """Return whether the tests fail with the fault in, and the end of what pytest printed."""
    path = tree / PACKAGE / fault.file
    sound = path.read_text()
    path.write_text(sound.replace(fault.old, fault.new))
    try:
        done = run_tests(tree, fault.tests, "-x", capture_output=True, timeout=LIMIT_S)
        code, printed = done.returncode, done.stdout
    except subprocess.TimeoutExpired:
        code, printed = 1, f"no end within {LIMIT_S} s"
    finally:
        path.write_text(sound)
    # any other code than 1 means that pytest itself did not get as far as a failing test
    return code == 1, "\n".join(printed.splitlines()[-TAIL_LINES:])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen faults and print one line each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--under", default="", help="only faults of files whose path begins so")
    parser.add_argument("--only", action="append", help="only the fault of this id (repeatable)")
    parser.add_argument("--check", action="store_true", help="only check that every fault fits")
    parser.add_argument("--sound", action="store_true", help="only run their tests without a fault")
    asked = parser.parse_args(arguments)
    known = [f for f in FAULTS if f.file.startswith(asked.under)]
    faults = [f for f in known if f.id in (asked.only or [f.id])]
    if misplaced := find_misplaced(faults):
        print("\n".join(misplaced))
        return 2
    if asked.check:
        print(f"{len(faults)} faults fit")
        return 0
    missed = []
    with tempfile.TemporaryDirectory(prefix="longseq-faults-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        if asked.sound:
            nodes = sorted({node for fault in faults for node in fault.tests})
            return run_tests(tree, nodes, capture_output=False).returncode
        for number, fault in enumerate(faults, 1):
            start = time.monotonic()
            red, printed = run_fault(tree, fault)
            took = time.monotonic() - start
            place = f"[{number}/{len(faults)}] {fault.id:30}"
            print(f"{place} {'red' if red else 'GREEN':5} {took:6.1f} s", flush=True)
            if not red:
                print(printed)
            missed += [] if red else [fault.id]
    names = f"; missed: {', '.join(missed)}" if missed else ""
    print(f"{len(faults) - len(missed)} of {len(faults)} found{names}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
