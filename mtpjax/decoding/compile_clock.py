"""Seconds that JAX spends tracing and compiling, so that run times can be told without them."""

from types import TracebackType

import jax.monitoring

_STAGES = "/jax/core/compile/"


class CompileClock:
    """Context manager that adds up the durations of tracing, lowering and compiling while it is open.

    Attributes:
        seconds: total so far. Compilation by other threads meanwhile is counted too.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> "CompileClock":
        jax.monitoring.register_event_duration_secs_listener(self._add)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        jax.monitoring.unregister_event_duration_listener(self._add)

    def _add(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event.startswith(_STAGES):
            self.seconds += duration_secs
