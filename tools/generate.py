"""`kvtier generate` behind its options: one prompt, its text, and where its prefix came from."""

import json
import sys
from pathlib import Path

from kvtier.engine.errors import BadPrompt
from kvtier.engine.request import Completion
from kvtier.engine.sampling import SamplingParams
from kvtier.tools.documents import find_documents
from kvtier.tools.engine import open_llm
from kvtier.tools.errors import BadDocument
from kvtier.tools.options import Tiers
from kvtier.tools.prompt import full_prompt


def run_generate(
    prompt: str,
    document: Path | None,
    model: Path,
    tiers: Tiers,
    sampling: SamplingParams,
    *,
    salt: str,
    threads: int | None,
    as_json: bool,
    exact: bool = False,
) -> None:
    """Print the text as it comes, then one line on standard error (or JSON) of what was reused."""
    if not prompt.strip():
        raise BadPrompt("prompt: empty; pass some text with --prompt")
    text = None
    if document is not None:
        found = find_documents([document])
        if len(found) != 1:
            raise BadDocument(f"{document}: {len(found)} documents; --document takes one text file")
        text = found[0].read()
    with open_llm(model, tiers, threads, exact=exact) as llm:
        tokens = full_prompt(llm.chat_prompt, text, prompt)

        def show(place: int, piece: str) -> None:
            print(piece, end="", flush=True)

        (done,) = llm.generate([tokens], sampling, salt=salt, on_text=None if as_json else show)
    if as_json:
        print(json.dumps(_as_json(done)))
    else:
        print()
        print(describe_hits(done), file=sys.stderr)


def describe_hits(done: Completion) -> str:
    """E.g. "4032 of 4071 prompt tokens cached (nvme 4032); first token after 0.312 s"."""
    tiers = ", ".join(f"{tier} {n}" for tier, n in done.hit_tokens.items())
    return (
        f"{done.cached_tokens} of {done.prompt_tokens} prompt tokens cached"
        f"{f' ({tiers})' if tiers else ''}; first token after {done.ttft_s:.3f} s"
    )


def _as_json(done: Completion) -> dict[str, object]:
    return {
        "text": done.text,
        "finish_reason": done.finish_reason,
        "prompt_tokens": done.prompt_tokens,
        "cached_tokens": done.cached_tokens,
        "hit_tokens": {str(tier): n for tier, n in done.hit_tokens.items()},
        "ttft_s": round(done.ttft_s, 4),
    }
