"""The loop: plan, launch, pick tokens, until the requests are done.

Binds scheduler and runner; knows neither text nor model directories. Not thread-safe.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from kvtier.engine.request import Request, State
from kvtier.engine.runner import Runner
from kvtier.engine.sampling import SamplingParams
from kvtier.engine.scheduler import EngineSettings, Scheduler
from kvtier.tiers.cache import TieredCache

OnToken = Callable[[Request, int | None], None]
"""Called for each token that becomes part of a request's output, and once with None at its end."""


class EngineCore:
    """`stop_ids`: the model's own end-of-text ids. Times are values of the cache's clock."""

    def __init__(
        self, cache: TieredCache, runner: Runner, settings: EngineSettings, stop_ids: Sequence[int]
    ) -> None:
        self._cache = cache
        self._runner = runner
        self._stop_ids = tuple(stop_ids)
        self.scheduler = Scheduler(cache, cache.block_size, settings, cache.clock, runner.forget)
        self._requests: dict[int, Request] = {}

    def submit(self, request: Request) -> None:
        self._requests[request.id] = request
        self.scheduler.add(request)

    def run(self, requests: Sequence[Request], on_token: OnToken | None = None) -> None:
        """Submit these requests and step until they are finished.

        Whatever happens, none of them holds anything afterwards. Raises `TierFull` if a request
        alone in the engine cannot get slots within the load deadline.
        """
        for request in requests:
            self.submit(request)
        try:
            while any(each.state is not State.FINISHED for each in requests):
                self.step(on_token)
        finally:
            for request in requests:
                self.scheduler.finish(request, "cancelled")
                self._requests.pop(request.id, None)

    def step(self, on_token: OnToken | None = None) -> int:
        """One launch, or a short wait for the cache if nothing can run; returns the rows run."""
        ticks = self._cache.signal.ticks
        work = self.scheduler.plan()
        if not work:
            for request in self.scheduler.loading:
                self._runner.preload(request)
            if not self.scheduler.idle:
                self._cache.signal.wait(ticks, self.scheduler.patience())
            return 0
        logits = self._runner.run(work)
        self.scheduler.advance(work)
        now = self._cache.clock()
        for number, row in logits.items():
            self._continue(self._requests[number], row, now, on_token)
        return sum(each.count for each in work)

    def _continue(
        self, request: Request, logits: Tensor, now: float, on_token: OnToken | None
    ) -> None:
        """Pick the request's next token and end it if that is its last."""
        assert request.sampler is not None and request.sampling is not None
        token = request.sampler.pick(logits)
        if request.first_token_at is None:
            request.first_token_at = now
        reason = self._take(request, request.sampling, token)
        if on_token is not None and reason != "stop":
            on_token(request, token)
        if reason:
            self.scheduler.finish(request, reason)
            if on_token is not None:
                on_token(request, None)

    def _take(self, request: Request, params: SamplingParams, token: int) -> str:
        """Append a token; returns why the request ends with it, or nothing."""
        model_stops = () if params.ignore_stop else self._stop_ids
        if token in model_stops or token in params.stop_ids:
            return "stop"
        request.append(token)
        return "length" if len(request.generated) == request.max_tokens else ""
