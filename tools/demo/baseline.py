"""transformers' own prefill of the demo's prompts, in a process of its own.

`python -m kvtier.tools.demo.baseline PLAN`. float32, the same number of threads, logits of the last
token only, a short prompt first: what a user of plain transformers would see at best.
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kvtier.engine.tokenizer import Tokenizer
from kvtier.tools.demo.plan import COMPARED, Plan
from kvtier.tools.demo.results import Baseline, to_line
from kvtier.tools.prompt import full_prompt


def main(plan_text: str) -> int:
    plan = Plan.from_json(plan_text)
    torch.set_num_threads(plan.threads)
    chat = Tokenizer(Path(plan.model)).encode_chat
    model: Any = AutoModelForCausalLM.from_pretrained(plan.model, dtype=torch.float32)
    model.eval()
    with torch.inference_mode():
        warm_up = torch.from_numpy(full_prompt(chat, None, "Hello").astype("int64"))[None]
        model(warm_up, use_cache=True, logits_to_keep=1)
        for subject in plan.subjects:
            text = Path(subject.path).read_text(encoding="utf-8")
            prompt = full_prompt(chat, text, f"{COMPARED}. {subject.question}")
            tokens = torch.from_numpy(prompt.astype("int64"))[None]
            started = time.perf_counter()
            model(tokens, use_cache=True, logits_to_keep=1)
            seconds = time.perf_counter() - started
            print(to_line(Baseline(subject.name, len(prompt), seconds)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
