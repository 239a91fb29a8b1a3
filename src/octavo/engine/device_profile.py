"""How long each step ran on the device, for `StepProfile`: events around its launches, read afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from octavo.engine.profile import StepProfile
from octavo.engine.sampler import SamplerOutput

if TYPE_CHECKING:
    from octavo.engine.runner import PendingStep


class DeviceProfile:
    """Puts events of the device around steps. `make_event` makes one: `record`, `synchronize` and
    `elapsed_time` in milliseconds, as a CUDA event with timing has them.
    """

    def __init__(self, profile: StepProfile, make_event: Callable[[], Any]) -> None:
        self._profile = profile
        self._make_event = make_event
        self._first = make_event()
        self._first.record()
        self._first.synchronize()
        self._first_at = profile.now()

    def around(self, launch: Callable[[], PendingStep]) -> PendingStep:
        """Launch a step between two events."""
        began, ended = self._make_event(), self._make_event()
        began.record()
        pending = launch()
        ended.record()
        return _TimedStep(self, pending, began, ended)

    def _read(self, began: Any, ended: Any) -> None:
        ended.synchronize()
        seconds = [self._first_at + 1e-3 * self._first.elapsed_time(event) for event in (began, ended)]
        self._profile.device_span("step", *seconds)


class _TimedStep:
    def __init__(self, profile: DeviceProfile, pending: PendingStep, began: Any, ended: Any) -> None:
        self._profile = profile
        self._pending = pending
        self._began = began
        self._ended = ended

    def collect(self) -> SamplerOutput:
        output = self._pending.collect()
        self._profile._read(self._began, self._ended)
        return output
