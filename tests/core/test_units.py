"""Quantities for people."""

import pytest

from stagewright.core.units import count, format_bytes, format_rate, format_time, name_type


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**40, "3072.0 GiB")],
)
def test_bytes(size_bytes, text):
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("time_s", "text"), [(0, "0 us"), (1.5e-5, "15 us"), (0.0123, "12.3 ms"), (4321.0, "4321 s")]
)
def test_times(time_s, text):
    assert format_time(time_s) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (0.0, "0"),
        (0.00001234, "0.00001234"),
        (12.345678, "12.35"),
        (999.96, "1,000"),
        (64_983.2, "64,980"),
        (1e5, "100,000"),
        (1.5e9, "1,500,000,000"),
    ],
)
def test_rates_are_never_in_scientific_notation(rate, text):
    assert format_rate(rate) == text


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (1, "stage", "1 stage"),
        (2, "stage", "2 stages"),
        (1, "micro-batch", "1 micro-batch"),
        (8, "micro-batch", "8 micro-batches"),
        (2, "process", "2 processes"),
    ],
)
def test_counts(number, noun, text):
    assert count(number, noun) == text


class Upsample:
    pass


class LSTM:
    pass


class UNet:
    pass


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1, "an int"),
        ([], "a list"),
        (Upsample(), "an Upsample"),
        (LSTM(), "an LSTM"),
        (UNet(), "a UNet"),
    ],
)
def test_types_have_their_article(value, text):
    assert name_type(value) == text
