"""Install lines hold on machines that have no folder of wheels.

`-c constraints.txt` was said to take torch's CPU build, which it did only where pip was pointed at
a local one: the package index has the CUDA build, eight times as large.
"""

import re
import subprocess

import pytest

from scripts.install_size import STATED

INDEX = "https://download.pytorch.org/whl/cpu"
WITH_TORCH = re.compile(r"pip install [^\n`]*\[(?:[\w,]*\b)?(?:torch|hf|fast|dev)\b")


def list_pages(repository):
    pages = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile"]
    return [repository / page for page in pages] + sorted((repository / "docs").rglob("*.md"))


def list_faults(text):
    """What a page promises that only local wheels keep."""
    faults = []
    for section in re.split(r"(?m)^#{2,} ", text):
        for line in section.splitlines():
            if "constraints" in line and re.search(r"CPU build", line) and INDEX not in line:
                faults.append(f"constraints choose no build of torch: {line}")
        if re.search(r"CPU build|torch without CUDA", section) and INDEX not in section:
            faults.append(f"a CPU build comes from {INDEX}: {section[:60]}")
        if WITH_TORCH.search(section) and not re.search(r"\d GB", section):
            faults.append(f"torch is gigabytes on Linux; say so: {section[:60]}")
    return faults


def test_pages_promise_no_more_than_the_package_index_has(repository):
    faults = {page.name: list_faults(page.read_text()) for page in list_pages(repository)}
    assert {name: found for name, found in faults.items() if found} == {}


@pytest.mark.parametrize(
    "text",
    [
        "pip install -e '.[torch]' -c constraints.txt  # torch's CPU build, not 3 GB",
        "Without GPUs, torch's CPU build is taken.",
        "pip install -e '.[hf,server]'",
        "`pip install '.[torch,hf]'`, about 200 MB",
    ],
)
def test_promises_that_only_local_wheels_keep_are_found(text):
    assert list_faults(text)


@pytest.mark.parametrize("stated", STATED, ids=lambda each: f"{each.extras} in {each.page}")
def test_sizes_are_those_that_the_index_was_asked_for(repository, stated):
    text = (repository / stated.page).read_text()
    assert stated.cuda in text
    assert stated.cpu in text
    assert set(re.findall(r"\d\.\d GB|\d+ MB", text)) <= {
        size for each in STATED if each.page == stated.page for size in (each.cuda, each.cpu)
    }


def run_make(repository, tmp_path, *words):
    done = subprocess.run(
        ["make", "-n", f"VENV={tmp_path}/venv", "setup", *words],
        cwd=repository, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [line for line in done.stdout.splitlines() if "pip install" in line]


def test_make_takes_the_cpu_build_by_a_variable(repository, tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    (whole,) = run_make(repository, tmp_path)
    assert "-c constraints.txt -e '.[dev]'" in whole
    assert "index" not in whole
    first, second = run_make(repository, tmp_path, f"TORCH_INDEX={INDEX}")
    assert first.endswith(f"-c constraints.txt --no-deps --index-url {INDEX} torch")
    assert second == whole
