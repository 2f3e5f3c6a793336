"""Writes tests/golden/logits/smollm2.bin and tests/golden/perplexity.json.

The weights are those of the quantized GGUF file, dequantised by the gguf package; transformers runs them in F32 with
eager attention. Also leaves the dequantised GGUF beside the original one.
"""

import json
import math

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import corpus
from dequantise_gguf import dequantise
from goldenio import CACHE, GOLDEN, SMOLLM2, SMOLLM2_SHA256, save, sha256, write_logits
from make_tokenizers import smollm2_tokenizer

CHAT = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"

# The positions to record, and prompts; the first one whose greedy steps are all clear is taken.
PROMPTS = [
    ([1, -1], ["The capital of France is"]),
    (
        [-1],
        [
            CHAT.format(q)
            for q in (
                "Explain in three sentences why the sky is blue.",
                "Write a short story about a lighthouse keeper.",
                "What is the difference between a list and a tuple in Python?",
                "Name three rivers in Europe and say where they flow.",
                "How do I boil an egg?",
                "Why do cats purr?",
            )
        ],
    ),
    ([-1], None),  # 150 tokens of english.txt
]
N_GREEDY = 64
MIN_MARGIN = 3e-4  # of the logit range: three times the error that tests allow
WINDOW = 512

NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
}


def unpermute(w, heads):
    """Rows of Q and K from GGUF's interleaved order back to the half-split order of Hugging Face."""
    return w.reshape(heads, w.shape[0] // heads // 2, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def load(path):
    reader = gguf.GGUFReader(path)
    get = lambda key: reader.fields[f"llama.{key}"].contents()
    heads, kv_heads = get("attention.head_count"), get("attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=get("vocab_size"),
        hidden_size=get("embedding_length"),
        intermediate_size=get("feed_forward_length"),
        num_hidden_layers=get("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=get("context_length"),
        rms_norm_eps=get("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": get("rope.freq_base")},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    state = {}
    for t in reader.tensors:
        w = gguf.dequantize(t.data, t.tensor_type).astype(np.float32)
        parts = t.name.removesuffix(".weight").split(".")
        name = NAMES[parts[-1]]
        if parts[0] == "blk":
            name = f"model.layers.{parts[1]}.{name}"
        if "q_proj" in name:
            w = unpermute(w, heads)
        if "k_proj" in name:
            w = unpermute(w, kv_heads)
        state[name + ".weight"] = torch.from_numpy(np.ascontiguousarray(w))
    model = LlamaForCausalLM(config).to(torch.float32).eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected, (missing, unexpected)
    model.tie_weights()
    return model


def logits_of(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0]


def greedy(model, ids, n):
    out, margins, past, feed = [], [], None, list(ids)
    with torch.no_grad():
        for _ in range(n):
            r = model(torch.tensor([feed]), cache=past, use_cache=True)
            past = r.cache
            top = torch.topk(r.logits[0, -1], 2)
            margins.append(float(top.values[0] - top.values[1]))
            feed = [int(top.indices[0])]
            out += feed
    # the same again without a cache
    full = logits_of(model, ids + out)
    assert full[len(ids) - 1 : -1].argmax(-1).tolist() == out
    return out, margins


def cases(model, tok, text_ids):
    for where, prompts in PROMPTS:
        if prompts:
            candidates = [tok.encode(p, add_special_tokens=False).ids for p in prompts]
        else:
            candidates = [text_ids[a : a + 150] for a in range(0, 2000, 37)]
        for ids in candidates:
            logits = logits_of(model, ids)
            positions = [p % len(ids) for p in where]
            spread = float(logits[positions].max() - logits[positions].min())
            tokens, margins = greedy(model, ids, N_GREEDY)
            print(f"{len(ids)} tokens, range {spread:.1f}, smallest margin {min(margins) / spread:.1e} of it: {tok.decode(tokens)!r}")
            if min(margins) >= MIN_MARGIN * spread:
                break
        else:
            raise SystemExit("a greedy step too close to a tie: choose another prompt")
        yield {"prompt": ids, "positions": positions, "greedy": tokens, "margin": margins, "logits": logits[positions].numpy()}


def perplexity(model, ids):
    nll, windows = 0.0, []
    for a in range(0, len(ids), WINDOW):
        part = ids[a : a + WINDOW]
        if len(part) < 2:
            continue
        logp = torch.log_softmax(logits_of(model, part)[:-1].double(), -1)
        loss = float(-logp.gather(1, torch.tensor(part[1:])[:, None]).sum())
        windows.append({"tokens": len(part), "mean_nll": loss / (len(part) - 1)})
        nll += loss
    scored = sum(w["tokens"] - 1 for w in windows)
    return {"n_tokens": len(ids), "n_scored": scored, "mean_nll": nll / scored, "perplexity": math.exp(nll / scored), "windows": windows}


def main():
    digest = sha256(SMOLLM2)
    assert digest == SMOLLM2_SHA256, f"{SMOLLM2}: sha256 {digest}, expected {SMOLLM2_SHA256}"
    plain = CACHE / "models" / "SmolLM2-135M-Instruct.F32.gguf"
    if not plain.exists():
        dequantise(SMOLLM2, plain)
    model, tok = load(SMOLLM2), smollm2_tokenizer()
    ids = tok.encode(corpus.english(), add_special_tokens=False).ids
    result = {
        "text": "english.txt",
        "text_sha256": sha256(GOLDEN / "english.txt"),
        "model": SMOLLM2.name,
        "model_sha256": digest,
        "window": WINDOW,
    } | perplexity(model, ids)
    save(GOLDEN / "perplexity.json", json.dumps(result, indent=2).encode() + b"\n")
    print("perplexity", result["perplexity"])
    write_logits(GOLDEN / "logits" / "smollm2.bin", model.config.vocab_size, list(cases(model, tok, ids)))


if __name__ == "__main__":
    main()
