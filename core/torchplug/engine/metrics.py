"""How long requests wait and run, and how full the cache is: one request's times, and a snapshot of the engine."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

_RECENT: Final = 1000
"""Finished requests over which a snapshot's times are taken."""


@dataclass(slots=True)
class RequestStateStats:
    """One request's times, in vLLM's field names. `arrival_time` is wall-clock seconds since the epoch; the others are
    seconds of one monotonic clock, 0.0 where it has not come to that yet.

    Attributes:
        num_generation_tokens: New tokens so far.
        arrival_time: When the request was made.
        queued_ts: When it was made.
        scheduled_ts: When it first took part in a step.
        first_token_ts: When its first new token was known.
        last_token_ts: When its latest one was known.
        first_token_latency: Seconds from its making to its first new token.
    """

    num_generation_tokens: int = 0
    arrival_time: float = field(default_factory=time.time)
    queued_ts: float = field(default_factory=time.monotonic)
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0

    def scheduled(self) -> None:
        """It takes part in a step; the first time counts, not those after a preemption."""
        if not self.scheduled_ts:
            self.scheduled_ts = time.monotonic()

    def token(self) -> None:
        """One more new token is known."""
        self.last_token_ts = time.monotonic()
        self.num_generation_tokens += 1
        if not self.first_token_ts:
            self.first_token_ts = self.last_token_ts
            self.first_token_latency = self.last_token_ts - self.queued_ts

    @property
    def queue_time(self) -> float:
        """Seconds before it first took part in a step."""
        return self.scheduled_ts - self.queued_ts if self.scheduled_ts else 0.0

    @property
    def inter_token_time(self) -> float | None:
        """Mean seconds between two new tokens; None where there are less than two."""
        if self.num_generation_tokens < 2:
            return None
        return (self.last_token_ts - self.first_token_ts) / (self.num_generation_tokens - 1)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds over the recent finished requests: mean, median and 99th percentile; all None where there are none."""

    mean: float | None
    p50: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Iterable[float]) -> Times:
        """Nearest-rank percentiles."""
        ordered = sorted(values)
        if not ordered:
            return cls(None, None, None)
        last = len(ordered) - 1
        return cls(sum(ordered) / len(ordered), ordered[round(0.5 * last)], ordered[round(0.99 * last)])


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """A snapshot of an engine. Of a request for several outputs (`n`), each output counts as one here.

    Attributes:
        num_running: Requests that take part in steps.
        num_waiting: Requests that do not yet.
        num_finished: Requests that came to their end since the engine started.
        num_aborted: Requests that were dropped before it, by `abort`, a failed step or `close`.
        prompt_tokens: Of the finished requests.
        generation_tokens: New tokens of the finished requests.
        queue_time: Seconds before the first step.
        time_to_first_token: Seconds from the request's making.
        inter_token_time: Mean seconds between two tokens of a request.
        cache_usage: Share of the cache's blocks that requests hold, 0 to 1; None without a cache.
        prefix_cache_hit_rate: Share of prompt tokens that were found cached, 0 to 1; None where it is off or
            nothing was asked yet.
        prefix_cache_limited: By cache ("attention", "state", ...), how many requests found less because of it than
            another one of the model's offered.
    """

    num_running: int
    num_waiting: int
    num_finished: int
    num_aborted: int
    prompt_tokens: int
    generation_tokens: int
    queue_time: Times
    time_to_first_token: Times
    inter_token_time: Times
    cache_usage: float | None
    prefix_cache_hit_rate: float | None
    prefix_cache_limited: Mapping[str, int]


class MetricsRecorder:
    """Collects what a snapshot reports. Safe to read from another thread than the one that writes."""

    def __init__(self) -> None:
        self.num_finished = 0
        self.num_aborted = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self._recent: deque[RequestStateStats] = deque(maxlen=_RECENT)

    def finished(self, stats: RequestStateStats, num_prompt_tokens: int) -> None:
        """A request came to its end."""
        self.num_finished += 1
        self.prompt_tokens += num_prompt_tokens
        self.generation_tokens += stats.num_generation_tokens
        self._recent.append(stats)

    def snapshot(
        self,
        *,
        num_running: int,
        num_waiting: int,
        cache_usage: float | None,
        prefix_cache_hit_rate: float | None,
        prefix_cache_limited: Mapping[str, int],
    ) -> EngineMetrics:
        """The state now."""
        recent = self._recent.copy()
        return EngineMetrics(
            num_running=num_running,
            num_waiting=num_waiting,
            num_finished=self.num_finished,
            num_aborted=self.num_aborted,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            queue_time=Times.of(stats.queue_time for stats in recent),
            time_to_first_token=Times.of(stats.first_token_latency for stats in recent),
            inter_token_time=Times.of(time for stats in recent if (time := stats.inter_token_time) is not None),
            cache_usage=cache_usage,
            prefix_cache_hit_rate=prefix_cache_hit_rate,
            prefix_cache_limited=dict(prefix_cache_limited),
        )
