"""`merge`, `diff` and `export`, on files."""

import csv
import io
import json

import pytest

from stagewright.cli.commands.diff import bar
from stagewright.core.profile.diff import ProfileDiff, diff
from stagewright.core.profile.merge import merge
from stagewright.core.profile.profile import Profile
from tests.core.affine import affine_profile


@pytest.fixture
def files(tmp_path):
    """Profiles at 2 and 8 samples, and one of another device."""
    found = {
        "two.json": affine_profile(2, spread=0.01),
        "eight.json": affine_profile(8, spread=0.01),
        "slow.json": affine_profile(8, scale=1.5, spread=0.01, device_name="Slow CPU"),
    }
    for name, profile in found.items():
        profile.write(tmp_path / name)
    return found


def test_merged_profile_is_written_and_shown(run, files):
    ran = run("merge", "two.json", "eight.json", "--microbatch", "4", "-o", "four.json")
    assert ran.code == 0, ran.stderr
    merged = Profile.read("four.json")
    assert merged == merge([files["two.json"], files["eight.json"]], samples=4)
    assert "ESTIMATED Affine" in ran.stdout
    assert "interpolated to 4 samples from profiles at 2 and 8" in ran.stdout
    assert ran.stderr.splitlines()[0] == "wrote four.json"
    planned = run("plan", "four.json", "--devices", "2xcpu", "--json")
    assert planned.code == 0, planned.stderr
    assert json.loads(planned.stdout)["estimated"] is True


def test_merged_json_is_the_file(run, files):
    affine_profile(2, scale=1.1, spread=0.01).write("again.json")
    ran = run("merge", "two.json", "again.json", "--json")
    assert (ran.code, ran.stderr) == (0, "")
    assert Profile.from_json(ran.stdout) == Profile.read("merged.json")


@pytest.mark.usefixtures("files")
def test_other_devices_are_refused_and_nothing_is_written(run, tmp_path):
    ran = run("merge", "two.json", "slow.json", "--microbatch", "4")
    assert (ran.code, ran.stdout) == (2, "")
    assert "two.json and slow.json cannot be merged" in ran.stderr
    assert "device: Fast CPU and Slow CPU" in ran.stderr
    assert not (tmp_path / "merged.json").exists()


@pytest.mark.usefixtures("files")
def test_the_same_file_twice_is_refused(run):
    ran = run("merge", "two.json", "two.json")
    assert (ran.code, ran.stdout) == (2, "")
    assert "two.json and two.json are the same profile" in ran.stderr


@pytest.mark.usefixtures("files")
def test_a_size_has_to_be_said(run):
    ran = run("merge", "two.json", "eight.json")
    assert ran.code == 2
    assert "--microbatch" in ran.stderr


@pytest.mark.usefixtures("files")
def test_differences_are_a_row_a_layer_with_bars(run):
    ran = run("diff", "eight.json", "slow.json")
    assert ran.code == 0, ran.stderr
    lines = [" ".join(line.split()) for line in ran.stdout.splitlines()]
    assert lines[2] == (
        "body.0 5 ms -> 7.5 ms +50.0% * 10 ms -> 15 ms +50.0% * |+++++ +50.0% * 612 B same"
    )
    assert lines[6].startswith("total ")
    assert "device: Fast CPU -> Slow CPU" in lines
    assert not any("only in" in line for line in lines)


def test_json_difference_is_the_record(run, files):
    ran = run("diff", "eight.json", "slow.json", "--json")
    assert (ran.code, ran.stderr) == (0, "")
    found = ProfileDiff.model_validate_json(ran.stdout)
    assert found == diff(files["eight.json"], files["slow.json"])


def test_layers_of_one_alone_are_named(run, files, tmp_path):
    affine_profile(8, layers=3).write(tmp_path / "short.json")
    assert "only in the first: 1 layer: body.3" in run("diff", "eight.json", "short.json").stdout
    assert "only in the second: 1 layer: body.3" in run("diff", "short.json", "eight.json").stdout


@pytest.mark.parametrize(
    ("relative", "drawn"),
    [
        (0.0, "          |          "),
        (0.5, "          |+++++     "),
        (1.0, "          |++++++++++"),
        (9.0, "          |++++++++++"),
        (-1 / 3, "     -----|          "),
        (-0.5, "----------|          "),
        (None, "          |++++++++++"),
    ],
)
def test_half_and_twice_are_full_bars(relative, drawn):
    assert bar(relative) == drawn


def test_export_is_csv_on_stdout_or_in_a_file(run, files):
    ran = run("export", "two.json")
    assert ran.code == 0
    rows = list(csv.DictReader(io.StringIO(ran.stdout)))
    assert len(rows) == len(files["two.json"].layers)
    assert float(rows[0]["forward_s"]) == files["two.json"].layers[0].forward.median_s
    ran = run("export", "two.json", "-o", "two.csv")
    assert (ran.code, ran.stdout) == (0, "")
    with open("two.csv", newline="") as file:
        assert list(csv.DictReader(file)) == rows


@pytest.mark.usefixtures("files")
def test_export_as_json_is_a_list_of_rows(run):
    ran = run("export", "two.json", "--json")
    assert (ran.code, ran.stderr) == (0, "")
    rows = json.loads(ran.stdout)
    assert rows[0]["layer"] == "body.0"
    assert rows[-1]["cut_forward_bytes"] is None


@pytest.mark.usefixtures("cluster_file")
@pytest.mark.parametrize("words", [("merge",), ("export",), ("diff", "cluster.json")])
def test_other_documents_are_named(run, words):
    ran = run(*words, "cluster.json")
    assert ran.code == 2
    assert "cluster.json is stagewright.cluster/1; expected stagewright.p" in ran.stderr
