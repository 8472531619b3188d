"""What `doctor` says about machines that differ."""

import json
import sys

from stagewright.cli.doctor import CudaDevice, Report, TorchReport, describe, examine

BARE = Report(
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
    assert set(report["missing"]) == {"torch", "hf", "fast", "server"}


def test_text_goes_on_with_the_next_command(run):
    ran = run("doctor")
    assert ran.code == 0
    assert "python" in ran.stdout
    assert ran.stderr.startswith("next: ")


def test_without_torch_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("stagewright.cli.doctor.missing_packages", lambda _: ("torch",))
    assert examine().torch is None
    text = describe(BARE)
    assert "planning works, measuring and running do not" in text
    assert "[torch]      without torch; run: pip install 'stagewright[torch]'" in text
    assert "[server]     installed" in text


def test_devices_are_listed_with_their_memory():
    torch = TorchReport(
        version="2.13.0",
        cuda_version="13.0",
        cuda_devices=(CudaDevice(0, "H200", 139 * 2**30),),
        distributed_backends=("gloo", "nccl"),
    )
    text = describe(Report(**{**vars(BARE), "torch": torch}))
    assert "cuda:0       H200, 139.0 GiB" in text
    assert "gloo, nccl" in text


def test_a_torch_that_does_not_import_is_told_apart(monkeypatch):
    def fail(_: str) -> None:
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr("stagewright.cli.doctor.importlib.import_module", fail)
    torch = examine().torch
    assert torch is not None
    assert "libcudart.so.13" in torch.error
