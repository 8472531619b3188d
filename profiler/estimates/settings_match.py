"""Compare the settings of a measured profile with those an estimate is for."""

from __future__ import annotations

from collections import Counter

from ...core.cluster.accelerators import Precision
from ...core.errors import InvalidInput
from ...core.graph.tensors import DIFFERENTIABLE, DType
from ...core.profile.profile import Profile

TENSORS: dict[Precision, DType] = {
    "float32": "float32",
    "tf32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
}
"""What tensors are of at each precision."""

FLOATING = DIFFERENTIABLE - {"complex64", "complex128"}


def check_settings(profile: Profile, precision: Precision, num_threads: int | None) -> None:
    """Insist that a profile may calibrate an estimate at that precision (and threads, on a CPU)."""
    found = profile.provenance
    if found.autocast:
        _refuse(profile, f"under autocast to {found.autocast}", f"at {precision} throughout")
    if found.compiled:
        _refuse(profile, "compiled", "without compilation")
    dtype = floating_dtype(profile)
    if dtype is not None and dtype != TENSORS[precision]:
        _refuse(profile, f"in {dtype}", f"in {TENSORS[precision]} (--precision)")
    if found.tf32 is not None and dtype == "float32":
        as_tf32 = found.tf32.startswith("products")
        if as_tf32 != (precision == "tf32"):
            ran = "tf32" if as_tf32 else "float32"
            _refuse(profile, f"with products in {ran}", f"at {precision} (--precision)")
    if num_threads is not None and found.num_threads != num_threads:
        threads = "an unknown number of" if found.num_threads is None else found.num_threads
        _refuse(profile, f"with {threads} threads", f"with {num_threads} (--threads)")


def floating_dtype(profile: Profile) -> DType | None:
    """Return the dtype of most floating tensors between layers, else of inputs, else `None`."""
    between = [tensor for boundary in profile.boundaries for tensor in boundary.tensors]
    for tensors in (between, profile.inputs):
        floating = [tensor.dtype for tensor in tensors if tensor.dtype in FLOATING]
        if floating:
            return Counter(floating).most_common(1)[0][0]
    return None


def _refuse(profile: Profile, measured: str, wanted: str) -> None:
    raise InvalidInput(
        f"the profile of {profile.model} was measured {measured}, and the estimate is {wanted}; "
        "calibrate by profiles measured with the settings of the estimate",
        field="/calibrate_by",
    )
