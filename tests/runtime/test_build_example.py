"""``examples/train.py`` under torchrun and in one process: the same losses."""

import os
import re
import runpy
import subprocess
import sys

import pytest
import torch

from tests.runtime.meta_init.test_materialise import plan_for

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]


def test_the_training_script_of_the_readme(
    repository, tmp_path, monkeypatch, capsys, forked_python
):
    script = repository / "examples" / "train.py"
    parts = runpy.run_path(str(script))
    plan = plan_for(parts["build_model"](), parts["make_batch"](), [4], num_microbatches=3)
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json(), encoding="utf-8")

    monkeypatch.setattr(sys, "argv", [str(script), str(path)])
    runpy.run_path(str(script), run_name="__main__")
    alone = losses(capsys.readouterr().out)

    done = subprocess.run(
        [
            forked_python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
            str(script), str(path),
        ],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(alone) == 5
    assert losses(done.stdout) == alone
    assert not torch.distributed.is_initialized()


def losses(output):
    return re.findall(r"step \d: loss \d\.\d{4}", output)
