"""Writes tests/golden/prompt_logprobs/<name>-tiny.bin: log-probabilities of the tokens of prompts, for the names given.

The models and prompts are those of tests/golden/logits/. The reference is transformers in F32 with eager attention and
log_softmax in F64 over its logits; the best tokens are those of its logits, and a position whose best ones are too close
to call has its count of clear ones cut.
"""

import sys

import torch
from transformers import AutoModelForCausalLM

from goldenio import GOLDEN, MODELS, f32, read_logits, save, u32

NAMES = ("llama31", "mistral", "qwen2", "qwen3", "smollm3", "gemma2", "llama4")  # the rest differs in nothing that matters here
N_BEST = 3
MIN_GAP = 1e-3  # between neighbours among the best, else their order is not tested

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)


def score(model, prompt):
    """For each token but the first: log-probability, best ids, their log-probabilities, how many of them are clear."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids, use_cache=False).logits[0].double(), -1)
    rows = []
    for position, token in enumerate(prompt[1:]):
        top = torch.topk(logprobs[position], N_BEST + 1)
        gaps = (top.values[:-1] - top.values[1:]).tolist()
        clear = next((i for i, gap in enumerate(gaps) if gap < MIN_GAP), N_BEST)
        rows.append((float(logprobs[position, token]), top.indices[:N_BEST].tolist(), top.values[:N_BEST].tolist(), clear))
    return rows


def main():
    for path in [GOLDEN / "logits" / f"{name}-tiny.bin" for name in sys.argv[1:] or NAMES]:
        model = AutoModelForCausalLM.from_pretrained(MODELS / path.stem, dtype=torch.float32, attn_implementation="eager").eval()
        _, cases = read_logits(path)
        out = [b"PGPROMP1", u32([len(cases), N_BEST])]
        for case in cases:
            prompt = case["prompt"].tolist()
            rows = score(model, prompt)
            out += [u32([len(prompt)]), u32(prompt)]
            for value, best, values, clear in rows:
                out += [f32([value]), u32([clear]), u32(best), f32(values)]
            print(f"{path.stem}: {len(prompt)} tokens, mean {sum(r[0] for r in rows) / max(len(rows), 1):.3f}, "
                  f"{sum(r[3] for r in rows)} of {N_BEST * len(rows)} best ones clear")
        save(GOLDEN / "prompt_logprobs" / path.name, b"".join(out))


main()
