from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_core() -> Iterator[None]:
    """Layers this small lose more by sharing cores than they gain, on a busy machine a lot."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
