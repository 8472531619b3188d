"""The durations a pipeline step is simulated with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from ...core.errors import InvalidInput


@dataclass(frozen=True)
class SkipTimes:
    """The transfer times of one skip connection, in seconds per micro-batch.

    Attributes:
        source: The stage that sends activations, and reads gradients.
        target: The stage behind the next one, or a later one, that reads them.
        forward_s: How long activations travel.
        backward_s: How long gradients travel.
        forward_channel: As in `StageTimes`.
        backward_channel: Likewise.
    """

    source: int
    target: int
    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_channel: int = -1
    backward_channel: int = -1


@dataclass(frozen=True)
class StageTimes:
    """Durations of one micro-batch on one replica, in seconds; S stages.

    Attributes:
        forward_s: Forward of each stage, S entries.
        backward_s: Backward of each stage, S entries; a forward that is computed again is in it.
        send_forward_s: From stage s to s + 1, S - 1 entries; empty if sending takes no time.
        send_backward_s: From stage s + 1 to s, S - 1 entries; empty if sending takes no time.
        tied_sync_s: Summing the gradients of tied weights, after everything else.
        saved_bytes: Activations a stage keeps per micro-batch from forward to backward; empty if
            not of interest. A stage that recomputes keeps its inputs.
        recomputed_bytes: Activations a stage has computed again, on top of the saved ones, while
            a backward is at work; empty if no stage recomputes.
        backward_input_s: Gradients of the inputs, where backwards are split; half of
            ``backward_s`` if empty.
        backward_weight_s: Gradients of the weights, likewise.
        recompute_s: The part of each backward, or of its input part, that computes the forward
            again, where the schedule has actions of its own for it (``R``); nothing if empty.
        sync_s: Summing the gradients of a stage over its replicas, once all have done their last
            backward and beside the work of other stages; empty if it takes no time.
        forward_channel: A link that messages from stage s to s + 1 share with all others of the
            same number, S - 1 entries; -1 for one of the sending rank's own. Empty: all own.
        backward_channel: The same for messages from stage s + 1 to s.
        skips: What goes past stages. Results of neighbours are waited for all the same.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    send_forward_s: Sequence[float] = ()
    send_backward_s: Sequence[float] = ()
    tied_sync_s: float = 0.0
    saved_bytes: Sequence[int] = ()
    recomputed_bytes: Sequence[int] = ()
    backward_input_s: Sequence[float] = ()
    backward_weight_s: Sequence[float] = ()
    recompute_s: Sequence[float] = ()
    sync_s: Sequence[float] = ()
    forward_channel: Sequence[int] = ()
    backward_channel: Sequence[int] = ()
    skips: Sequence[SkipTimes] = ()

    @property
    def num_stages(self) -> int:
        return len(self.forward_s)

    @property
    def shares_channels(self) -> bool:
        """Return True if some messages share a link."""
        past = ((skip.forward_channel, skip.backward_channel) for skip in self.skips)
        numbers = chain(self.forward_channel, self.backward_channel, *past)
        return any(number >= 0 for number in numbers)

    def check(self, num_stages: int) -> None:
        """Raise `InvalidInput` unless there are durations for exactly this many stages."""
        boundaries = num_stages - 1
        for name, values, accepted in (
            ("forward_s", self.forward_s, (num_stages,)),
            ("backward_s", self.backward_s, (num_stages,)),
            ("send_forward_s", self.send_forward_s, (0, boundaries)),
            ("send_backward_s", self.send_backward_s, (0, boundaries)),
            ("saved_bytes", self.saved_bytes, (0, num_stages)),
            ("recomputed_bytes", self.recomputed_bytes, (0, num_stages)),
            ("backward_input_s", self.backward_input_s, (0, num_stages)),
            ("backward_weight_s", self.backward_weight_s, (0, num_stages)),
            ("recompute_s", self.recompute_s, (0, num_stages)),
            ("sync_s", self.sync_s, (0, num_stages)),
            ("forward_channel", self.forward_channel, (0, boundaries)),
            ("backward_channel", self.backward_channel, (0, boundaries)),
        ):
            if len(values) not in accepted:
                raise InvalidInput(f"{name} has {len(values)} entries for {num_stages} stages")
        if len(self.backward_input_s) != len(self.backward_weight_s):
            raise InvalidInput("backward_input_s and backward_weight_s come together or not at all")
        for skip in self.skips:
            if not 0 <= skip.source < skip.target - 1 < num_stages - 1:
                raise InvalidInput(
                    f"no message passes by a stage from {skip.source} to {skip.target} of "
                    f"{num_stages} stages"
                )
