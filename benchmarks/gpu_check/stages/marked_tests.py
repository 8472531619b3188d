"""The tests marked ``gpu``, file by file, so that a file that cannot be imported ends no other."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from benchmarks.gpu_check.driver import REPOSITORY
from benchmarks.gpu_check.program import Failed, Given, Lacking, Result, run_program

NEEDED = ("pytest", "pytest_timeout")
MARK = re.compile(r"\bpytest\.mark\.gpu\b")


def marked_tests(given: Given) -> Result:
    """Run the tests that need a GPU; return how many passed, failed and were skipped."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise Lacking(f"not installed: {', '.join(missing)}")
    files = [
        str(path.relative_to(REPOSITORY))
        for path in sorted((REPOSITORY / "tests").rglob("test_*.py"))
        if MARK.search(path.read_text(encoding="utf-8"))
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
        command += ["--continue-on-collection-errors", f"--junitxml={path}", *files]
        done = subprocess.run(command, cwd=REPOSITORY, check=False)
        if not path.exists():
            raise RuntimeError(f"the tests did not run: pytest ended with {done.returncode}")
        result = read_report(path)
    result["files"] = files
    if result["failed"]:
        raise Failed(f"{result['failed']} tests failed, the first {result['faults'][0]}", result)
    if given.device == "cuda" and not result["passed"]:
        raise Failed("no test marked gpu ran", result)
    return result


def read_report(path: Path) -> Result:
    """Count what pytest's report says; a file that lacks a package is left out, and named."""
    result: Result = {"passed": 0, "failed": 0, "skipped": 0, "left_out": [], "faults": []}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}".strip(".")
        fault = next((entry for entry in case if entry.tag in ("failure", "error")), None)
        if fault is None:
            result["skipped" if case.find("skipped") is not None else "passed"] += 1
            continue
        absent = re.search(r"No module named '([^']+)'", fault.text or "")
        if fault.tag == "error" and absent:
            result["left_out"].append(f"{name} needs {absent[1]}")
        else:
            result["failed"] += 1
            result["faults"].append(f"{name}: {(fault.get('message') or '').strip()[:300]}")
    return result


if __name__ == "__main__":
    sys.exit(run_program(marked_tests))
