"""Estimates kept between commands."""

import json
import os
import shlex
import subprocess
import sys
import time

import pytest

from stagewright.cli.support import estimate_cache
from stagewright.cli.support.estimate_cache import MAX_ENTRIES, cache_folder, recall_or_make
from stagewright.core.cluster.cluster import Cluster, LinkLevel
from stagewright.core.plan.plan import Plan
from stagewright.core.profile.profile import Profile

WORDS = ("plan", "resnet18", "-d", "2xL4", "--json")


def make(calls, answer):
    def made():
        calls.append(answer)
        return answer

    return made


def test_an_answer_is_made_once_and_anew_where_asked(run):
    calls: list[dict[str, int]] = []
    for use in (True, True, False):
        assert recall_or_make({"of": 1}, make(calls, {"is": 2}), use=use) == {"is": 2}
    assert len(calls) == 2
    assert recall_or_make({"of": 3}, make(calls, {"is": 4}), use=True) == {"is": 4}


def test_a_damaged_entry_is_made_again():
    calls: list[dict[str, int]] = []
    recall_or_make({"of": 1}, make(calls, {"is": 2}), use=True)
    (entry,) = cache_folder().glob("*.json")
    for damaged in ('{"is": ', "[]"):
        entry.write_text(damaged)
        assert recall_or_make({"of": 1}, make(calls, {"is": 2}), use=True) == {"is": 2}
    assert len(calls) == 3


def test_another_version_of_the_code_asks_again(monkeypatch):
    calls: list[dict[str, int]] = []
    recall_or_make({"of": 1}, make(calls, {"is": 2}), use=True)
    monkeypatch.setattr(estimate_cache, "_code", lambda: ["newer"])
    recall_or_make({"of": 1}, make(calls, {"is": 2}), use=True)
    assert len(calls) == 2


def test_the_least_used_entries_go(monkeypatch):
    monkeypatch.setattr(estimate_cache, "MAX_ENTRIES", 3)
    for number in range(5):
        recall_or_make({"of": number}, lambda: {}, use=True)
        for age, entry in enumerate(sorted(cache_folder().glob("*"), key=os.path.getmtime)):
            os.utime(entry, (time.time() - 100 + age,) * 2)
    assert len(list(cache_folder().iterdir())) == 3 < MAX_ENTRIES


def test_a_folder_that_cannot_be_written_changes_nothing(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert recall_or_make({"of": 1}, lambda: {"is": 2}, use=True) == {"is": 2}


def test_plan_and_estimate_share_it_and_answer_without_torch(run):
    first = run(*WORDS)
    assert first.code == 0, first.stderr
    assert len(list(cache_folder().glob("*.json"))) == 2
    script = (
        "import sys; from stagewright.cli.main import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    for words in (WORDS, ("estimate", "resnet18", "--device", "L4", "-o", "profile.json")):
        done = subprocess.run(
            [sys.executable, "-c", script, *words], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        if words is WORDS:
            assert Plan.from_json(done.stdout) == Plan.from_json(first.stdout)
    plan = Plan.from_json(first.stdout)
    assert Profile.read("profile.json").content_id() == plan.profile_id


def test_a_named_plan_is_explained_by_its_file_alone(run):
    named = ("plan", "resnet18", "-d", "2xL4", "--microbatch", 2, "-m", 4, "--schedule", "gpipe")
    ran = run(*named, "-o", "plan.json")
    assert "next: stagewright explain plan.json\n" in ran.stderr
    assert run("plan", "resnet18", "-d", "3xL4", "-o", "other.json").code == 0
    by_cache = run("explain", "plan.json")
    assert by_cache.code == 0, by_cache.stderr
    estimated = run("estimate", "resnet18", "--device", "L4", "--microbatch", 2, "-o", "p.json")
    assert estimated.code == 0, estimated.stderr
    assert by_cache.stdout == run("explain", "plan.json", "p.json", "-d", "2xL4").stdout
    words = shlex.split(by_cache.stderr.splitlines()[-1].removeprefix("next: stagewright "))
    assert words[:6] == ["plan", "resnet18", "-d", "2xL4", "--microbatch", "2"]
    again = run(*words, "--json")
    assert Plan.from_json(again.stdout).profile_id == Plan.read("plan.json").profile_id


def test_a_plan_is_explained_by_its_own_links_of_several(run):
    """By those planned last it was said to be edited."""
    named = ("plan", "resnet18", "--microbatch", 2, "-m", 4, "--schedule", "gpipe", "--stages", 2)
    for name, rate in (("slow", 1e8), ("fast", 1e10)):
        devices = Cluster.parse("2xL4").devices
        level = LinkLevel(group_size=2, bandwidth_bytes_per_s=rate)
        Cluster(devices=devices, levels=(level,)).write(f"{name}.json")
        assert run(*named, "-d", f"{name}.json", "-o", f"{name}-plan.json").code == 0
    for name in ("slow", "fast"):
        ran = run("explain", f"{name}-plan.json")
        assert ran.code == 0, ran.stderr
        assert f"-d {name}.json" in ran.stderr or "-d" not in ran.stderr
    ran = run("explain", "slow-plan.json", "-d", "fast.json")
    assert ran.code != 0
    assert "do not match" in ran.stderr


def test_what_an_estimate_is_needed_for_is_said_without_the_cache(run):
    ran = run(*WORDS[:-1], "--no-cache", "-o", "plan.json")
    assert "next: stagewright estimate resnet18 --device L4 -o profile.json\n" in ran.stderr
    ran = run("explain", "plan.json")
    assert (ran.code, ran.stdout) == (2, "")
    assert "not in the cache; give the plan's profile and devices: stagewright exp" in ran.stderr
    ran = run("explain", "plan.json", "profile.json")
    assert "name the plan's devices as well" in ran.stderr


def test_an_entry_of_another_version_explains_nothing(run):
    assert run(*WORDS[:-1], "-o", "plan.json").code == 0
    for entry in cache_folder().glob("*.json"):
        held = json.loads(entry.read_text())
        held.pop("taken", None)
        entry.write_text(json.dumps(held))
    ran = run("explain", "plan.json")
    assert (ran.code, ran.stdout) == (2, "")
    assert "is not in the cache" in ran.stderr


@pytest.mark.parametrize("words", [WORDS, ("estimate", "resnet18", "--device", "L4")])
def test_no_cache_keeps_nothing(run, words):
    assert run(*words, "--no-cache").code == 0
    assert not cache_folder().exists() or not list(cache_folder().iterdir())
