"""Two that watch linear attention at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attn_diag.watching.live.linear_records import LinearRecorder


def ended_in_either_order(
    watch: Callable[[LinearRecorder], Callable[[], None]], call: Callable[[], object]
) -> Iterator[tuple[list[LinearRecorder], list[LinearRecorder]]]:
    """After each end: those that still watch, and those that recorded a call that is made then.

    Args:
        watch: Begins; what it returns ends.
        call: What is to be recorded.
    """
    recorders = [LinearRecorder(lambda: True) for _ in range(2)]
    for order in (recorders, recorders[::-1]):
        ends = {id(recorder): watch(recorder) for recorder in recorders}
        for number, recorder in enumerate(order, 1):
            ends[id(recorder)]()
            for other in recorders:
                other.calls.clear()
            call()
            yield list(order[number:]), [other for other in recorders if other.calls]
