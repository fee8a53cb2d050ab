"""The Python face: prompts in, completions out, with every prompt's prefix reused where it can be.

Puts the rooms together; each of them decides its own matters. One `LLM` serves one thread.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch

from kvtier.engine.assembly import CacheSettings, open_cache
from kvtier.engine.core import EngineCore, OnToken
from kvtier.engine.cpu_attention import CpuAttention
from kvtier.engine.errors import BadPrompt, BadSettings
from kvtier.engine.exact import settle_exact
from kvtier.engine.identity import namespace_of
from kvtier.engine.model import Attention, LlamaModel
from kvtier.engine.model_config import read_config
from kvtier.engine.request import Completion, Request
from kvtier.engine.runner import Runner
from kvtier.engine.sampling import SamplingParams
from kvtier.engine.scheduler import EngineSettings
from kvtier.engine.sizing import CudaMeter, measured
from kvtier.engine.tokenizer import Message, TextStream, Tokenizer, has_tokenizer
from kvtier.engine.weights import load_weights
from kvtier.index.namespace import BlockLayout, Namespace
from kvtier.index.words import Tokens, as_tokens
from kvtier.tiers.lease import CacheStatistics, Ticket

Prompt = str | Sequence[int] | npt.NDArray[np.integer]
OnText = Callable[[int, str], None]
"""Called with a prompt's position in the list and the text that has just become known."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Flushed:
    """`blocks` of the path are durably in the store; `failed` could not be written."""

    blocks: int
    failed: int


class LLM:
    """A model and its cache. Use it as a context manager, or call `close`.

    Raises what reading the directory and opening the tiers raise (all `KvtierError`).
    """

    def __init__(
        self,
        model_dir: str | Path,
        *,
        cache: CacheSettings | None = None,
        engine: EngineSettings | None = None,
        dtype: str = "float32",
        device: str = "cpu",
        threads: int | None = None,
    ) -> None:
        """`threads`: CPU threads of torch, for the whole process (None leaves it as it is).

        Raises `NotExact` if `engine.exact` is asked for where it cannot be had.
        """
        _refuse_bad_machine(dtype, device, threads)
        if threads is not None:
            torch.set_num_threads(threads)
        settings, engine = cache or CacheSettings(), engine or EngineSettings()
        engine.cuts(settings.block_size)  # refuses before anything is opened
        self.share_tokens = engine.exact_chunk if engine.exact else settings.block_size
        """A prompt's KV is kept and found by whole multiples of so many tokens."""
        self.directory = Path(model_dir)
        self.config = config = read_config(self.directory)
        self.layout = BlockLayout(
            config.layers, config.kv_heads, settings.block_size, config.head_dim, dtype
        )
        self._namespace = namespace_of(self.directory, config, self.layout)
        with ExitStack() as stack:
            # The weights first: the pool gets what they leave.
            model = LlamaModel(config, load_weights(self.directory, config, DTYPES[dtype], device))
            if device != "cpu":
                settings = measured(
                    settings,
                    engine,
                    self.layout,
                    model,
                    lambda pool: _attention(pool, 0),
                    config.max_positions,
                    device,
                    CudaMeter(device),
                )
            self._open = open_cache(settings, self.layout, device)
            stack.callback(self._open.close)
            self.cache, self.store = self._open.cache, self._open.store
            exact = None
            if engine.exact:
                size, chunk, batch = settings.block_size, engine.exact_chunk, engine.max_running
                alone = partial(_attention, max_positions=0, share_prefixes=False)
                exact = settle_exact(model, alone, size, chunk, batch)
                self._namespace = replace(self._namespace, exact=exact.name)
            attention = _attention(
                self._open.hbm.tensor, config.max_positions, share_prefixes=not engine.exact
            )
            runner = Runner(
                model, attention, self.cache.guard, settings.block_size, device, exact=exact
            )
            self._core = EngineCore(self.cache, runner, engine, config.stop_ids)
            self._resources = stack.pop_all()
        self._ids = count()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Loaded at first use. Raises `ModelFileMissing` where the directory has none."""
        return Tokenizer(self.directory)

    def namespace(self, salt: str = "") -> Namespace:
        """What this model's blocks are filed under; another `salt` shares nothing."""
        return replace(self._namespace, salt=salt)

    def chat_prompt(self, messages: Sequence[Message]) -> Tokens:
        """Token ids of a chat, up to where the model's answer begins."""
        return self.tokenizer.encode_chat(messages)

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        salt: str = "",
        on_text: OnText | None = None,
    ) -> list[Completion]:
        """Complete every prompt, together; results in the order of the prompts.

        `sampling`: one for all, or one for each. `on_text` sees text as it is generated.
        Raises `BadPrompt` before anything runs if a prompt is empty or too long.
        """
        if isinstance(prompts, str):
            raise BadPrompt("prompts: a single text was given; pass a list of prompts")
        params = self._params(sampling, len(prompts))
        requests = [
            self._request(self._tokens(prompt), each, salt)
            for prompt, each in zip(prompts, params, strict=True)
        ]
        self._core.run(requests, None if on_text is None else self._shown(requests, on_text))
        return [each.completion(self._text(each)) for each in requests]

    def prefill(self, tokens: Sequence[int] | Tokens, *, salt: str = "") -> Completion:
        """Bring the whole blocks of `tokens` (in exact mode: the whole chunks) into the cache,
        computing what it lacks.

        Raises `BadPrompt` if they do not fill one, or are too many.
        """
        size = self.share_tokens
        ids = as_tokens(tokens)
        if len(ids) < size:
            unit = "block" if size == self.layout.block_size else "chunk"
            raise BadPrompt(f"prefill: {len(ids)} tokens do not fill one {unit} of {size}")
        request = self._request(ids[: len(ids) // size * size], None, salt)
        self._core.run([request])
        return request.completion()

    def prefetch(
        self, tokens: Sequence[int] | Tokens, *, salt: str = "", timeout_s: float | None = None
    ) -> Ticket:
        """A hint that a prompt will begin with `tokens`, e.g. of documents just retrieved.

        Brings what the store has of them into DRAM, behind whatever requests wait for; no read
        begins after `timeout_s`. Returns at once; close the ticket when the prompt has been asked.
        May be called from another thread than `generate`. Raises `BadTokens`.
        """
        deadline = None if timeout_s is None else self.cache.clock() + timeout_s
        digest = self.namespace(salt).digest
        return self.cache.prefetch(digest, as_tokens(tokens), deadline=deadline)

    def flush(
        self, tokens: Sequence[int] | Tokens, *, salt: str = "", timeout_s: float = 60.0
    ) -> Flushed:
        """Make the cached whole blocks of `tokens` durable in the last store.

        What is not done after `timeout_s` counts as failed; what was written by then stays.
        """
        ticket = self.cache.flush(self.namespace(salt).digest, as_tokens(tokens))
        ticket.wait(self.cache.clock() + timeout_s)
        total = len(tokens) // self.layout.block_size
        blocks = ticket.blocks
        ticket.close()
        return Flushed(blocks, total - blocks)

    def statistics(self) -> CacheStatistics:
        """The cache's counters."""
        return self.cache.statistics()

    def close(self) -> None:
        """Finish copies in flight and let go of every tier. Idempotent."""
        self._resources.close()

    def _tokens(self, prompt: Prompt) -> Tokens:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else as_tokens(prompt)

    def _params(
        self, sampling: SamplingParams | Sequence[SamplingParams] | None, prompts: int
    ) -> list[SamplingParams]:
        if sampling is None or isinstance(sampling, SamplingParams):
            return [sampling or SamplingParams()] * prompts
        if len(sampling) != prompts:
            raise BadPrompt(f"sampling: {len(sampling)} given for {prompts} prompts; match them")
        return list(sampling)

    def _request(self, tokens: Tokens, params: SamplingParams | None, salt: str) -> Request:
        longest, size = self.config.max_positions, self.layout.block_size
        if not len(tokens):
            raise BadPrompt("prompt: empty; pass at least one token")
        if len(tokens) > longest:
            raise BadPrompt(
                f"prompt: {len(tokens)} tokens, the model allows {longest}; shorten the prompt"
            )
        if int(tokens.max()) >= self.config.vocab_size:
            raise BadPrompt(
                f"prompt: token id {int(tokens.max())} is outside the vocabulary of "
                f"{self.config.vocab_size}; encode it with this model's tokenizer"
            )
        # The last token generated needs no position: its K and V are never computed.
        room = longest - len(tokens) + 1
        allowed = 0 if params is None else min(params.max_tokens, room)
        blocks, slots = -(-(len(tokens) + allowed) // size), self._open.hbm.num_slots
        if blocks > slots:
            raise BadPrompt(
                f"prompt: {len(tokens)} tokens and up to {allowed} more need {blocks} blocks, the "
                f"HBM pool has {slots}; raise hbm_bytes to {blocks * self.layout.nbytes}"
            )
        digest = self.namespace(salt).digest
        return Request(next(self._ids), digest, tokens, params, allowed, self.cache.clock())

    def _shown(self, requests: Sequence[Request], on_text: OnText) -> OnToken:
        streams = {each.id: TextStream(self.tokenizer) for each in requests}
        places = {each.id: place for place, each in enumerate(requests)}

        def show(request: Request, token: int | None) -> None:
            stream = streams[request.id]
            text = stream.end() if token is None else stream.push(token)
            if text:
                on_text(places[request.id], text)

        return show

    def _text(self, request: Request) -> str:
        if not has_tokenizer(self.directory):
            return ""
        return self.tokenizer.decode(request.generated)


def _refuse_bad_machine(dtype: str, device: str, threads: int | None) -> None:
    if dtype not in DTYPES:
        raise BadSettings(f"dtype: {dtype!r} is not supported; use one of {', '.join(DTYPES)}")
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise BadSettings(f"device: {device!r} is not supported; use cpu, cuda or cuda:N")
    if device != "cpu" and not torch.cuda.is_available():
        raise BadSettings(f"device: {device!r} asked for, but torch sees no CUDA; use cpu")
    if threads is not None and threads < 1:
        raise BadSettings(f"threads: {threads} given, want 1 or more")


def _attention(pool: torch.Tensor, max_positions: int, *, share_prefixes: bool = True) -> Attention:
    if pool.device.type == "cpu":
        # One context is ready from the start, at the price of at most half the pool once more.
        half = pool.shape[0] * pool.shape[4] // 2
        return CpuAttention(pool, ready_tokens=min(max_positions, half))
    # Triton exists on Linux only, and loading it takes a second that a CPU engine need not spend.
    from kvtier.engine.triton_attention import TritonAttention

    return TritonAttention(pool, share_prefixes=share_prefixes)
