"""What `doctor` says about machines that differ."""

import json
import sys

import pytest

from stagewright.cli.commands.doctor import MachineReport, describe, examine
from stagewright.cli.support.gpu_report import CudaDevice, TorchReport, parse_query
from stagewright.cli.support.optional_dependencies import EXTRAS
from stagewright.core.errors import RankFailed

BARE = MachineReport(
    stagewright="0.1.0",
    python="3.12.1",
    system="Linux",
    cores=2,
    memory_bytes=8 * 2**30,
    torch=None,
    missing={"torch": ("torch",), "server": ()},
)


def test_json_is_one_document(run):
    ran = run("doctor", "--json")
    assert (ran.code, ran.stderr) == (0, "")
    report = json.loads(ran.stdout)
    assert report["python"] == ".".join(map(str, sys.version_info[:3]))
    assert report["cores"] >= 1
    assert report["memory_bytes"] > 0
    assert set(report["missing"]) == set(EXTRAS) >= {"torch", "server", "cluster", "client"}


def test_text_goes_on_with_the_next_command(run):
    ran = run("doctor")
    assert ran.code == 0
    assert "python" in ran.stdout
    assert ran.stderr.startswith("next: ")


def test_without_torch_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("stagewright.cli.commands.doctor.missing_packages", lambda _: ("torch",))
    assert examine().torch is None
    text = describe(BARE)
    assert "planning works; measuring and running do not" in text
    assert "[torch]      missing torch; run: pip install -e '.[torch]' (in the checkout)" in text
    assert "[server]     installed" in text


def test_devices_are_listed_with_their_memory():
    torch = TorchReport(
        version="2.13.0",
        cuda_version="13.0",
        cuda_devices=(CudaDevice(0, "H200", 139 * 2**30),),
        distributed_backends=("gloo", "nccl"),
    )
    text = describe(MachineReport(**{**vars(BARE), "torch": torch}))
    assert "cuda:0       H200, 139.0 GiB\n" in text
    assert "gloo, nccl" in text


def test_a_torch_that_does_not_import_is_told_apart(monkeypatch):
    def fail(_: str) -> None:
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr("stagewright.cli.support.gpu_report.importlib.import_module", fail)
    torch = examine().torch
    assert torch is not None
    assert "libcudart.so.13" in torch.error


def test_a_devices_state_is_on_its_line():
    device = CudaDevice(
        1, "H200", 139 * 2**30, free_bytes=100 * 2**30, driver="580.1", clock_mhz=345,
        max_clock_mhz=1980, pcie="gen 5 x16", peers=(0, 2),
    )  # fmt: skip
    torch = TorchReport(version="2.13.0", cuda_version="13.0", cuda_devices=(device,))
    text = describe(MachineReport(**{**vars(BARE), "torch": torch, "free_memory_bytes": 2**30}))
    assert (
        "cuda:1       H200, 139.0 GiB, 100.0 GiB free, 345 of 1980 MHz, PCIe gen 5 x16, "
        "driver 580.1, peer access to cuda:0, cuda:2"
    ) in text
    assert "memory       8.0 GiB, 1.0 GiB free" in text
    assert "torch        2.13.0, CUDA 13.0" in text


def test_what_the_driver_says_goes_to_its_device_and_gaps_are_left_out():
    said = (
        "GPU-a, 580.1, 345, 1980, 5, 16\n"
        "GPU-b, 580.1, [N/A], [Not Supported], [N/A], [N/A]\n"
        "No devices were found\n"
    )
    assert parse_query(said) == {
        "GPU-a": {
            "driver": "580.1",
            "clock_mhz": 345,
            "max_clock_mhz": 1980,
            "pcie": "gen 5 x16",
        },
        "GPU-b": {"driver": "580.1"},
    }


@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_links_are_on_the_same_screen(run, monkeypatch, forked_python):
    monkeypatch.setattr("stagewright.cli.commands.doctor.LINKS_BUDGET_S", 0.5)
    ran = run("doctor", "--links")
    assert ran.code == 0
    lines = ran.stdout.splitlines()
    assert any(line.startswith("memory ") for line in lines)
    row = next(line.split() for line in lines if line.startswith("node "))
    assert row[1] == "2"
    assert "measuring links between 2 cpu ranks" in ran.stderr


def test_links_that_cannot_be_measured_leave_the_rest(run, monkeypatch):
    def fail(*_: object) -> None:
        raise RankFailed("rank 1 stopped answering")

    monkeypatch.setattr("stagewright.profiler.links.launch_local.measure_links_here", fail)
    ran = run("doctor", "--links", "--json")
    assert (ran.code, ran.stderr) == (0, "")
    report = json.loads(ran.stdout)
    assert report["cores"] >= 1
    assert report["links"] == {"report": None, "error": "rank 1 stopped answering"}
