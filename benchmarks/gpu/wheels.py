"""Packages from a folder of wheels, for a machine without internet; only the standard library."""

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
NO_PTH = ("nvidia_cutlass_dsl/dsl_packages",)
"""Folders that a .pth file would add to the path; pip installs none with --target."""

REPORTS_ONLY = {"altair", "pandas", "vl-convert-python"}
"""Requirements without which everything runs here; .ci/run tries it."""


class MissingWheels(Exception):
    """Packages that are needed and neither installed nor among the wheels."""


def use_wheels(wheels: Path, out: Path) -> None:
    """Install the wheels of packages that are missing, and start this command again with them.

    Returns if it runs with them. Raises MissingWheels if a package is still missing.
    """
    site = (out / "site").absolute()
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(site) not in path:
        site.mkdir(parents=True, exist_ok=True)
        sys.path.insert(0, str(site))
        install([name for name in names_of(wheels) if not is_installed(name)], wheels, site)
        added = [str(site), *(str(site / name) for name in NO_PTH if (site / name).is_dir())]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [*added, *path]))}
        sys.stdout.flush()
        os.execve(sys.executable, sys.orig_argv, environment)
    if missing := find_missing(wheels):
        raise MissingWheels(f"{wheels} lacks wheels for {', '.join(missing)}; add them")


def names_of(wheels: Path) -> list[str]:
    """Return the packages of which a folder has wheels."""
    return sorted({path.name.split("-")[0] for path in wheels.glob("*.whl")})


def install(names: list[str], wheels: Path, site: Path) -> None:
    """Install packages without what they require, which --target would install again."""
    if not names:
        return
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--quiet",
               "--find-links", str(wheels), "--target", str(site), *names]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise MissingWheels(f"the wheels in {wheels} can't be installed: {reason}")


def find_missing(wheels: Path) -> list[str]:
    """Return what this checkout or a wheel needs in any case, and what is not installed."""
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    installed = filter(is_installed, names_of(wheels))
    lines += ["pytest", *(line for name in installed for line in metadata.requires(name) or [])]
    names = {re.split(r"[^\w.-]", line)[0] for line in lines if ";" not in line}
    return sorted(name for name in names - REPORTS_ONLY if not is_installed(name))


def is_installed(name: str) -> bool:
    """Return True if a package can be found on the path, by any spelling of its name."""
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
