"""Contenders that take turns: each captured in a CUDA graph of one call for each layer, replayed over several passes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from parity import path

PASSES = 3
REPLAYS = 15
WARMUP = 3
SLOW = 500_000.0  # microseconds: a replay that takes longer is timed once in each pass
SLOW_CALL = SLOW / 10  # a call that takes longer is made on one layer


@dataclass
class Contender:
    """Something timed: one call for each layer. note: what a reader of its time must know; why there is none, if there is none."""

    name: str
    calls: Sequence[Callable[[], Any]]
    graphed: bool = True
    launches: int | None = None
    times: list[float] = field(default_factory=list)  # microseconds a call
    note: str = ""
    source: str | None = None
    moved: int | None = None  # bytes, where they aren't the problem's
    flops: int | None = None


def race(contenders: Sequence[Contender], device: str) -> None:
    """Capture every contender, then time them in turns."""
    ready: list[tuple[Contender, Callable[[], Any]]] = []
    for contender in contenders:
        if not contender.calls:
            continue
        try:
            contender.launches = _count_launches(contender.calls[0])
            contender.calls = _patiently(contender.calls)
            ready.append((contender, _replay(contender, device)))
        except Exception as error:  # a peer that can't be called is a row that says so
            contender.note = _words(error)
    for _ in range(PASSES):
        for contender, replay in ready:
            contender.times += _timed(replay, len(contender.calls))


def _replay(contender: Contender, device: str) -> Callable[[], Any]:
    """One call for each layer, from a graph; without one when it can't be captured, and the note says so."""
    if not contender.graphed:
        return _eager(contender.calls)
    try:
        return _captured(contender.calls, device)
    except Exception as error:
        torch.cuda.synchronize()
        contender.note = f"without a graph, which it refuses: {_words(error)}"
        return _eager(contender.calls)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _count_launches(call: Callable[[], Any]) -> int:
    call()
    torch.cuda.synchronize()
    return sum(path.profiled(call).values())


def _patiently(calls: Sequence[Callable[[], Any]]) -> Sequence[Callable[[], Any]]:
    """The calls, or the first alone when it is slow: what takes so long finds nothing in the L2 cache anyway."""
    return calls[:1] if _elapsed(calls[0], 1)[0] > SLOW_CALL else calls


def _captured(calls: Sequence[Callable[[], Any]], device: str) -> Callable[[], Any]:
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.current_stream(device)), torch.cuda.graph(graph):  # a failed capture leaves its stream current
        for call in calls:
            call()
    return graph.replay


def _eager(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    def run() -> None:
        for call in calls:
            call()

    return run


def _timed(replay: Callable[[], Any], calls: int) -> list[float]:
    """Microseconds a call, of each replay."""
    first = _elapsed(replay, 1)[0] / calls
    if first * calls > SLOW:
        return [first]
    for _ in range(WARMUP - 1):
        replay()
    return [elapsed / calls for elapsed in _elapsed(replay, REPLAYS)]


def _elapsed(replay: Callable[[], Any], count: int) -> list[float]:
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for start, end in marks:
        start.record()
        replay()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1000 for start, end in marks]
