"""Captures in threads of one process do not see each other, nor another thread's training."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from stagewright.capture.capture import capture
from tests.torch_models import make_case


def test_captures_side_by_side_are_those_one_by_one():
    cases = [make_case(name) for name in ("resnet", "unet", "resnet")]
    expected = [capture(case.model, case.sample) for case in cases]
    with ThreadPoolExecutor(len(cases)) as threads:
        found = list(threads.map(lambda case: capture(case.model, case.sample), cases))
    assert found == expected


def test_a_model_trained_in_another_thread_changes_no_capture():
    case = make_case("mlp")
    expected = capture(case.model, case.sample)
    stop, steps = threading.Event(), 0

    def train():
        nonlocal steps
        model = nn.Linear(4, 4)
        while not stop.is_set():
            model(torch.rand(2, 4)).sum().backward()
            steps += 1

    thread = threading.Thread(target=train)
    thread.start()
    try:
        found = [capture(case.model, case.sample) for _ in range(3)]
    finally:
        stop.set()
        thread.join()
    assert steps
    assert found == [expected] * 3
