"""Precisions by short names and by torch's."""

import pytest

from stagewright.cli.support.named_models import lengthen_dtype, read_precision
from stagewright.core.errors import InvalidInput


@pytest.mark.parametrize(
    ("text", "precision", "dtype"),
    [
        ("bf16", "bf16", "bfloat16"), ("bfloat16", "bfloat16", "bfloat16"),
        ("BF16", "bf16", "bfloat16"), ("fp16", "float16", "float16"),
        ("float16", "float16", "float16"), ("fp32", "fp32", "float32"),
        ("float32", "float32", "float32"), ("tf32", "tf32", "tf32"), (None, None, None),
    ],
)  # fmt: skip
def test_both_spellings_are_read(text, precision, dtype):
    """Cause: --autocast took bfloat16, and --precision did not."""
    assert read_precision(text) == precision
    assert lengthen_dtype(text) == dtype


def test_others_are_refused_or_left_to_who_checks_them():
    with pytest.raises(InvalidInput, match="tf32, fp16, not 'int8'"):
        read_precision("int8")
    assert lengthen_dtype("int8") == "int8"
