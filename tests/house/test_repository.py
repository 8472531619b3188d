"""Files for people who work on the repository agree with each other and with the Makefile."""

import re

import pytest
import yaml

import stagewright


@pytest.fixture
def makefile(repository):
    return (repository / "Makefile").read_text()


def recipe(makefile: str, target: str) -> list[str]:
    """The commands of a target, without make's variables."""
    lines = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)[1].splitlines()
    return [line.strip().replace("$(BIN)", ".venv/bin") for line in lines]


def test_pre_commit_runs_what_make_check_runs(repository, makefile):
    (repo,) = yaml.safe_load((repository / ".pre-commit-config.yaml").read_text())["repos"]
    assert [hook["entry"] for hook in repo["hooks"]] == recipe(makefile, "check")


def test_workflows_run_targets_that_exist(repository, makefile):
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    called = set()
    for path in (repository / ".github" / "workflows").glob("*.yml"):
        jobs = yaml.safe_load(path.read_text())["jobs"]
        for step in (step for job in jobs.values() for step in job["steps"]):
            found = re.search(r"^make (?:[A-Z]+=.* )?([a-z]+)(?: \|\||$)", step.get("run", ""))
            called |= {found[1]} if found else set()
    assert {"test", "docs", "dist"} <= called <= targets


def test_the_pythons_tested_are_those_that_are_supported(repository, pyproject):
    checks = yaml.safe_load((repository / ".github" / "workflows" / "checks.yml").read_text())
    pythons = checks["jobs"]["tests"]["strategy"]["matrix"]["python"]
    assert pyproject["project"]["requires-python"] == f">={pythons[0]}"


def test_forms_and_citation_can_be_read(repository):
    for path in (repository / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        assert "blank_issues_enabled" in form or {"name", "description", "body"} <= set(form)
    citation = yaml.safe_load((repository / "CITATION.cff").read_text())
    assert citation["version"] == stagewright.__version__
    assert citation["license"] == "Apache-2.0"


def test_nothing_says_to_install_what_is_not_published(repository):
    documents = [repository / "README.md", *(repository / "docs").glob("*/*.md")]
    for path in documents:
        assert not re.search(r"pip install\s+'?stagewright", path.read_text()), path
