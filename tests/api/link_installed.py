"""In place of docker/install-api.sh: the same packages, linked from this environment, not fetched.

usage: link_installed.py PYTHON SOURCE
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

BUILD = "import sys, setuptools.build_meta as b; print(b.build_wheel(sys.argv[1]))"


def main(python: Path, source: Path) -> None:
    """Build the source, unpack it into the environment, and link what its extras ask for.

    Raises:
        SystemExit: Something is asked for that is not here, or in another version.
    """
    library = python.parent.parent / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = library / "site-packages"
    subprocess.run([sys.executable, "-c", BUILD, packages], cwd=source, check=True, stdout=2)
    (wheel,) = packages.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(packages)
    wheel.unlink()
    (own,) = metadata.distributions(path=[str(packages)])
    pinned = pins(source / "constraints.txt")
    for name in closure(own, asked_extras(source / "docker" / "install-api.sh")):
        link(metadata.distribution(name), packages, pinned)


def asked_extras(script: Path) -> set[str]:
    """Those that the image's script installs by itself."""
    (found,) = re.findall(r"^extras=\$\{3:-(.+)\}$", script.read_text(), re.MULTILINE)
    return set(found.split(","))


def pins(constraints: Path) -> dict[str, str]:
    """The version of each name."""
    lines = re.findall(r"^([\w.-]+)==(\S+)", constraints.read_text(), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in lines}


def closure(own: metadata.Distribution, extras: set[str]) -> set[str]:
    """Names of everything that one package with these extras asks for, itself apart."""
    asked = {(canonicalize_name(own.name), extra) for extra in ("", *extras)}
    waiting = sorted(asked)
    while waiting:
        name, extra = waiting.pop()
        found = own if name == canonicalize_name(own.name) else metadata.distribution(name)
        for text in found.requires or ():
            wanted = Requirement(text)
            if wanted.marker and not wanted.marker.evaluate({"extra": extra}):
                continue
            more = {(canonicalize_name(wanted.name), each) for each in ("", *wanted.extras)}
            waiting += sorted(more - asked)
            asked |= more
            if canonicalize_name(wanted.name) != canonicalize_name(own.name):
                check(wanted)
    return {name for name, _ in asked} - {canonicalize_name(own.name)}


def check(wanted: Requirement) -> None:
    """That what is here would do."""
    here = metadata.version(wanted.name)
    if not wanted.specifier.contains(here, prereleases=True):
        sys.exit(f"{wanted} is asked for, and {here} is here; run 'make setup'")


def link(found: metadata.Distribution, packages: Path, pinned: dict[str, str]) -> None:
    """Every file or folder it has beside others in site-packages."""
    name = canonicalize_name(found.name)
    if name in pinned and not SpecifierSet(f"=={pinned[name]}").contains(found.version):
        sys.exit(f"constraints.txt has {name} {pinned[name]}, and {found.version} is here")
    for top in {path.parts[0] for path in found.files or ()} - {"..", "__pycache__"}:
        target = packages / top
        if not target.exists():
            os.symlink(found.locate_file(top), target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
