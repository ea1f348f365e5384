"""Which files hide modules that longseq needs."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from longseq_bench.core.hidden_modules import NEEDED, find_hidden_modules


def test_a_file_before_the_installed_module_is_found(tmp_path: Path) -> None:
    """Only a needed name that is installed as well, and only in a folder that comes first."""
    mine, installed = tmp_path / "mine", tmp_path / "site-packages"
    for name in ("mine/yaml.py", "mine/mytool.py", "mine/psutil/__init__.py", "mine/torch.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name in ("yaml/__init__.py", "psutil.py", "mytool.py", "torch/__init__.py"):
        (installed / name).parent.mkdir(parents=True, exist_ok=True)
        (installed / name).touch()
    assert find_hidden_modules([str(mine), str(installed), "/no/such/folder"]) == [
        ("psutil", str(mine / "psutil/__init__.py"), str(installed)),
        ("yaml", str(mine / "yaml.py"), str(installed)),
    ]
    assert find_hidden_modules([str(installed), str(mine)]) == []


def test_every_package_that_is_installed_with_longseq_can_be_hidden() -> None:
    """With the versions that are installed here; older ones need a few others."""
    wanted, packages = ["longseq-bench"], set[str]()
    while wanted:
        name = canonicalize_name(wanted.pop())
        if name not in packages and not name.startswith("nvidia"):
            packages.add(name)
            found = map(Requirement, metadata.requires(name) or ())
            wanted += [one.name for one in found if _is_needed(one)]
    own = {"example", "isympy"}  # never imported
    for module, owners in metadata.packages_distributions().items():
        if not packages.isdisjoint(map(canonicalize_name, owners)) and module not in own:
            assert module in NEEDED or module.startswith("_"), owners


def _is_needed(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def test_the_standard_library_can_be_hidden_too(tmp_path: Path) -> None:
    (tmp_path / "signal.py").touch()
    standard = os.path.dirname(os.__file__)
    found = find_hidden_modules([str(tmp_path), standard])
    assert found == [("signal", str(tmp_path / "signal.py"), standard)]


def test_python_m_runs_nothing_of_the_current_folder(tmp_path: Path) -> None:
    """Python takes the folder into its path, and imports this package before its `__main__`."""
    for name in ("typing", "json", "signal", "psutil", "typer", "pydantic"):
        (tmp_path / f"{name}.py").write_text(f"open('ran', 'a').write('{name} ')")
    command = [sys.executable, "-m", "longseq_bench", "--version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert not (tmp_path / "ran").exists()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("longseq ")
