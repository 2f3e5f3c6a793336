"""Writes tests/data/models/<name>-tiny/ and tests/golden/logits/<name>-tiny.bin.

  make_models.py [NAME…]   all of them, or these

Each model has random weights from a seed, scaled so that attention is neither flat nor one-hot and logits spread over
some ten units; experts' weights of gptoss lie on the grid of MXFP4, so that one golden file serves for both. The
reference is transformers in F32 with eager attention; the same model in F64 says how far F32 itself
is off. Prompts are chosen so that no greedy step is close to a tie, and no choice of experts.
"""

import json
import math
import shutil
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save as safetensors_save
from transformers import AutoModelForCausalLM, AutoTokenizer

import corpus
import hybrid_specs
import small_tokenizers as st
from goldenio import GOLDEN, MODELS, save, write_logits

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)

COMMON = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "rms_norm_eps": 1e-5,
    "use_cache": True,
}

# `store` is the type in the safetensors file; weights are rounded to `exact` first, so that every file holds the same
# numbers. exact=float32 keeps all 24 bits: a reader that goes through a shorter type is found out.
SPECS = {
    "llama31": {
        "store": torch.float32,
        "exact": torch.float16,
        "gguf": {"f32": gguf.GGMLQuantizationType.F32, "f16": gguf.GGMLQuantizationType.F16},
        "config": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 512,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "factor": 8.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 64,
                "rope_type": "llama3",
            },
            "tie_word_embeddings": False,
            "bos_token_id": 507,
            "eos_token_id": [508, 511],
            "torch_dtype": "float32",
        },
        "tokenizer": {"bos": "<|begin_of_text|>", "eos": "<|eot_id|>", "chat_template": st.LLAMA3_CHAT, "add_bos": True},
        "pre": "llama-bpe",
    },
    "mistral": {
        "store": torch.float32,
        "exact": torch.float32,
        "shards": 2,
        "gguf": {"f32": gguf.GGMLQuantizationType.F32},
        "config": {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "vocab_size": 512,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": "float32",
        },
        "tokenizer": {"bos": "<s>", "eos": "</s>", "chat_template": st.MISTRAL_CHAT, "add_bos": True},
    },
    "qwen2": {
        "store": torch.bfloat16,
        "exact": torch.bfloat16,
        "config": {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_size": 96,
            "intermediate_size": 192,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_window_layers": 3,
            "rms_norm_eps": 1e-6,
            "sliding_window": 1024,
            "use_sliding_window": False,
            "vocab_size": 512,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": True,
            "bos_token_id": 497,
            "eos_token_id": 499,
            "torch_dtype": "bfloat16",
        },
        "tokenizer": {"eos": "<|im_end|>", "pad": "<|endoftext|>", "chat_template": st.CHATML},
    },
    "qwen3": {
        "store": torch.float32,
        "exact": torch.float16,
        "gguf": {"f32": gguf.GGMLQuantizationType.F32, "f16": gguf.GGMLQuantizationType.F16},
        "config": {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "layer_types": ["full_attention", "full_attention"],
            "max_window_layers": 2,
            "rms_norm_eps": 1e-6,
            "sliding_window": None,
            "use_sliding_window": False,
            "vocab_size": 512,
            # the newer way of writing it (transformers 5)
            "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
            "tie_word_embeddings": True,
            "bos_token_id": 507,
            "eos_token_id": 509,
            "dtype": "float32",
        },
        "tokenizer": {"eos": "<|im_end|>", "pad": "<|endoftext|>", "chat_template": st.CHATML},
        "pre": "qwen2",
    },
    "smollm3": {
        "store": torch.float16,
        "exact": torch.float16,
        "config": {
            "architectures": ["SmolLM3ForCausalLM"],
            "model_type": "smollm3",
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "layer_types": ["full_attention"] * 5,
            "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 0, 1, 0, 1],
            "rms_norm_eps": 1e-6,
            "sliding_window": None,
            "use_sliding_window": False,
            "vocab_size": 512,
            "rope_parameters": {"rope_theta": 50000.0, "rope_type": "default"},
            "tie_word_embeddings": True,
            "bos_token_id": 507,
            "eos_token_id": 509,
            "pad_token_id": 507,
            "dtype": "float16",
        },
        "tokenizer": {"eos": "<|im_end|>", "pad": "<|endoftext|>", "chat_template": st.CHATML},
    },
    "mixtral": {
        "store": torch.float32,
        "exact": torch.float32,
        "gguf": {"f32": gguf.GGMLQuantizationType.F32},
        "config": {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "hidden_size": 64,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 512,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": "float32",
        },
        "tokenizer": {"bos": "<s>", "eos": "</s>", "chat_template": st.MISTRAL_CHAT, "add_bos": True},
    },
    "qwen3moe": {
        "store": torch.float32,
        "exact": torch.float16,
        "gguf": {"f32": gguf.GGMLQuantizationType.F32, "f16": gguf.GGMLQuantizationType.F16},
        "pre": "qwen2",
        "config": {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_size": 64,
            "intermediate_size": 96,
            "moe_intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [1],
            "max_window_layers": 3,
            "rms_norm_eps": 1e-6,
            "sliding_window": None,
            "use_sliding_window": False,
            "vocab_size": 512,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": True,
            "bos_token_id": 507,
            "eos_token_id": 509,
            "torch_dtype": "float32",
        },
        "tokenizer": {"eos": "<|im_end|>", "pad": "<|endoftext|>", "chat_template": st.CHATML},
    },
    "gptoss": {
        "store": torch.float32,
        "exact": torch.float32,
        "gguf": {"f32": gguf.GGMLQuantizationType.F32, "mxfp4": gguf.GGMLQuantizationType.MXFP4},
        "pre": "llama-bpe",
        "config": {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "attention_bias": True,
            "hidden_size": 64,
            "intermediate_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 24,
            "swiglu_limit": 7.0,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 8.0,
                "original_max_position_embeddings": 256,
                "rope_type": "yarn",
                "truncate": False,
            },
            "vocab_size": 512,
            "tie_word_embeddings": False,
            "bos_token_id": 507,
            "eos_token_id": [508, 511],
            "torch_dtype": "float32",
        },
        "tokenizer": {"bos": "<|begin_of_text|>", "eos": "<|eot_id|>", "chat_template": st.LLAMA3_CHAT, "add_bos": True},
    },
}

SPECS |= hybrid_specs.SPECS

# Lengths of the prompts, and where logits are recorded.
LENGTHS = {5: [0, 1, 2, 3, 4], 37: [0, 15, 16, 17, 36], 150: [0, 31, 63, 64, 100, 149]}
N_GREEDY = 64
MIN_MARGIN = 1e-3  # of the logit range: ten times what the test allows as error
MIN_ROUTER_GAP = 1e-4  # between the last expert chosen and the next one; F32 is off by 1e-6


def pretty(d):
    return json.dumps(d, indent=2, sort_keys=True).encode() + b"\n"


def is_gemma(model_type):
    return model_type.startswith("gemma")


def mxfp4_blocks(x):
    """What MXFP4 makes of experts [experts, in, out]: blocks of GGUF [experts, out, in / 32, 17]."""
    rows = x.transpose(1, 2).contiguous().numpy()
    return gguf.quants.quantize(rows, gguf.GGMLQuantizationType.MXFP4).reshape(*rows.shape[:2], -1, 17)


def mxfp4_values(blocks):
    return torch.from_numpy(gguf.quants.dequantize(blocks.reshape(*blocks.shape[:2], -1), gguf.GGMLQuantizationType.MXFP4))


def init_weights(model, exact, seed):
    gen = torch.Generator().manual_seed(seed)
    heads = model.config.num_hidden_layers
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            x = torch.randn(p.shape, generator=gen, dtype=torch.float32)
            if name.endswith("norm.weight"):
                x = 1 + 0.25 * x
                if "q_norm" in name or "k_norm" in name:
                    x = 1.3 * x
                elif name == "model.norm.weight" and model.config.tie_word_embeddings:
                    x = 5.0 * x
                if is_gemma(model.config.model_type):
                    x = x - 1  # what it holds is what is missing from one
            elif name.endswith("bias") or "sinks" in name:
                x = 0.5 * x
            elif "experts" in name:
                # [experts, in, out] in Llama 4 and gpt-oss, which has MXFP4 in mind; [experts, out, in] elsewhere
                oss = model.config.model_type == "gpt_oss"
                turned = oss or model.config.model_type == "llama4_text"
                x = x * (2.5 if "down" in name else 2.0) / math.sqrt(p.shape[1 if turned else 2])
                if oss:
                    x = mxfp4_values(mxfp4_blocks(x)).transpose(1, 2)
            elif "embed_tokens" in name:
                # Small, so that the epsilon of the first norm matters.
                x = 0.05 * x
            elif "lm_head" in name:
                x = x * 2.0 / math.sqrt(p.shape[1])
            elif "q_proj" in name or "k_proj" in name:
                x = x * 1.4 / math.sqrt(p.shape[1])
            elif "o_proj" in name or "down_proj" in name:
                x = x * 2.0 / math.sqrt(p.shape[1] * heads)
            else:
                x = x * 1.5 / math.sqrt(p.shape[1])
            p.copy_(x.to(exact).to(torch.float32))
    return model


def logits_of(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0]


def router_gap(model, ids):
    """The smallest distance between the logits of the last expert chosen and the next one."""
    gaps = []

    def look(module, _, out):
        logits = out[1] if type(module).__name__ == "Llama4Router" else out[0]
        top = torch.topk(logits.reshape(-1, module.num_experts), module.top_k + 1).values
        gaps.append(float((top[:, -2] - top[:, -1]).min()))

    routers = [m for m in model.modules() if type(m).__name__.endswith("Router")]
    hooks = [m.register_forward_hook(look) for m in routers]
    logits_of(model, ids)
    for h in hooks:
        h.remove()
    return min(gaps, default=math.inf)


def greedy(model, prompt, n):
    ids, margins = list(prompt), []
    for _ in range(n):
        top = torch.topk(logits_of(model, ids)[-1], 2)
        margins.append(float(top.values[0] - top.values[1]))
        ids.append(int(top.indices[0]))
    return ids[len(prompt) :], margins


def make_case(model, wide, length, where, text_ids, vocab):
    for seed in range(400):
        rng = np.random.default_rng([length, seed])
        if length == 37:  # real text
            at = int(rng.integers(0, len(text_ids) - length))
            prompt = text_ids[at : at + length]
        else:
            prompt = rng.integers(0, vocab, length).tolist()
        logits = logits_of(model, prompt)
        spread = float(logits[where].max() - logits[where].min())
        tokens, margins = greedy(model, prompt, N_GREEDY)
        if min(margins) < MIN_MARGIN * spread or len(set(tokens)) < 8:
            continue
        gap = router_gap(model, prompt + tokens)
        if gap < MIN_ROUTER_GAP:
            continue
        error = float((logits_of(wide, prompt) - logits).abs().max()) / spread
        print(
            f"  {length} tokens: range {spread:.2f}, smallest margin {min(margins) / spread:.1e} of it, "
            f"F32 against F64 {error:.1e}, {len(set(tokens))} distinct greedy tokens, smallest router gap {gap:.1e}, seed {seed}"
        )
        return {"prompt": prompt, "positions": where, "greedy": tokens, "margin": margins, "logits": logits[where].numpy()}
    raise SystemExit(f"no prompt of {length} tokens with clear greedy steps")


def permute(w, heads):
    """Rows of Q and K from the half-split order of Hugging Face to the interleaved order of GGUF's llama models."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
    "feed_forward.router": "ffn_gate_inp",
    "feed_forward.shared_expert.gate_proj": "ffn_gate_shexp",
    "feed_forward.shared_expert.up_proj": "ffn_up_shexp",
    "feed_forward.shared_expert.down_proj": "ffn_down_shexp",
}


# Instead, in models with norms after attention and feed-forward.
POST_NORM_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(name, post_norms):
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    if name == "lm_head.weight":
        return "output.weight"
    _, _, layer, rest = name.split(".", 3)
    base, kind = rest.rsplit(".", 1)
    names = GGUF_NAMES | POST_NORM_NAMES if post_norms else GGUF_NAMES
    return f"blk.{layer}.{names[base]}.{kind}"


def gguf_tensors(config, state, gemma):
    """Pairs of a GGUF name and an F32 array."""
    oss = config["model_type"] == "gpt_oss"
    turned = oss or config["model_type"] == "llama4_text"
    for key, value in state.items():
        a = value.to(torch.float32).numpy()
        prefix = f"blk.{key.split('.')[2]}." if key.startswith("model.layers.") else ""
        if key.endswith(".experts.gate_up_proj"):
            a = a.swapaxes(1, 2) if turned else a
            gate, up = (a[:, ::2], a[:, 1::2]) if oss else np.split(a, 2, axis=1)
            yield prefix + "ffn_gate_exps.weight", gate
            yield prefix + "ffn_up_exps.weight", up
        elif key.endswith(".experts.down_proj"):
            yield prefix + "ffn_down_exps.weight", a.swapaxes(1, 2) if turned else a
        elif key.endswith("gate_up_proj_bias"):
            yield prefix + "ffn_gate_exps.bias", a[:, ::2]
            yield prefix + "ffn_up_exps.bias", a[:, 1::2]
        elif key.endswith("down_proj_bias"):
            yield prefix + "ffn_down_exps.bias", a
        elif key.endswith("sinks"):
            yield prefix + "attn_sinks.weight", a
        elif oss and "post_attention_layernorm" in key:
            yield prefix + "post_attention_norm.weight", a
        else:
            yield gguf_name(key, gemma), a


def llama3_factors(config):
    """What rope_freqs.weight holds: the number each frequency is divided by."""
    s, dim = config["rope_scaling"], config["head_dim"]
    low = s["original_max_position_embeddings"] / s["low_freq_factor"]
    high = s["original_max_position_embeddings"] / s["high_freq_factor"]
    out = []
    for i in range(0, dim, 2):
        wavelength = 2 * math.pi * config["rope_theta"] ** (i / dim)
        if wavelength < high:
            out.append(1.0)
        elif wavelength > low:
            out.append(s["factor"])
        else:
            t = (s["original_max_position_embeddings"] / wavelength - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
            out.append(1 / ((1 - t) / s["factor"] + t))
    return np.array(out, np.float32)


def write_gguf(path, name, spec, state, tok, sp):
    config, kind = COMMON | spec["config"], spec["gguf"][path.name.split(".")[-2]]
    archs = {"qwen3": "qwen3", "gemma2": "gemma2", "gemma3_text": "gemma3", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss"}
    archs |= {"llama4_text": "llama4"}
    arch = archs.get(config["model_type"], "llama")
    gemma = arch.startswith("gemma")
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    rope = config.get("rope_parameters", config)
    with tempfile.TemporaryDirectory() as tmp:
        out = Path(tmp) / "x.gguf"
        w = gguf.GGUFWriter(out, arch)
        w.add_type("model")
        w.add_name(f"{name}-tiny")
        w.add_block_count(config["num_hidden_layers"])
        w.add_context_length(config["max_position_embeddings"])
        w.add_embedding_length(config["hidden_size"])
        w.add_feed_forward_length(config.get("intermediate_size_mlp", config["intermediate_size"]))
        w.add_head_count(config["num_attention_heads"])
        w.add_head_count_kv(config["num_key_value_heads"])
        w.add_rope_freq_base(rope["rope_theta"])
        w.add_layer_norm_rms_eps(config["rms_norm_eps"])
        w.add_key_length(head_dim)
        w.add_value_length(head_dim)
        w.add_file_type(gguf.LlamaFileType.ALL_F32 if kind == gguf.GGMLQuantizationType.F32 else gguf.LlamaFileType.MOSTLY_F16)
        if arch == "llama":
            w.add_vocab_size(config["vocab_size"])
            w.add_rope_dimension_count(head_dim)
        if gemma:
            w.add_sliding_window(config["sliding_window"])
            w.add_attention_scale(config["query_pre_attn_scalar"] ** -0.5)
        if arch == "gemma2":
            w.add_attn_logit_softcapping(config["attn_logit_softcapping"])
            w.add_final_logit_softcapping(config["final_logit_softcapping"])
        if arch == "gemma3":
            w.add_rope_freq_base_swa(config["rope_local_base_freq"])
            w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            w.add_rope_scaling_factor(config["rope_scaling"]["factor"])
        if n_experts := config.get("num_local_experts", config.get("num_experts")):
            w.add_expert_count(n_experts)
            w.add_expert_used_count(config["num_experts_per_tok"])
            w.add_expert_feed_forward_length(config.get("moe_intermediate_size", config["intermediate_size"]))
        if arch == "qwen3moe":
            w.add_expert_weights_norm(config["norm_topk_prob"])
        if arch == "llama4":
            w.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
            w.add_sliding_window(config["attention_chunk_size"])
            w.add_attn_temperature_length(config["floor_scale"])
            w.add_attn_temperature_scale(config["attn_scale"])
        if arch == "gpt-oss":
            w.add_sliding_window(config["sliding_window"])
            w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            w.add_rope_scaling_factor(config["rope_scaling"]["factor"])
            w.add_rope_scaling_orig_ctx_len(config["rope_scaling"]["original_max_position_embeddings"])
        w.add_quantization_version(2)
        t = spec["tokenizer"]
        if gemma:
            st.gguf_gemma(w, sp)
        elif sp:
            st.gguf_sentencepiece(w, sp)
        else:
            st.gguf_byte_level(w, tok, spec["pre"], t.get("bos"), t["eos"], t.get("add_bos", False), config["vocab_size"])
        w.add_chat_template(t["chat_template"])
        if arch.startswith("llama") and "rope_scaling" in config:
            w.add_tensor("rope_freqs.weight", llama3_factors(config))
        for key, a in gguf_tensors(config, state, gemma):
            a = np.ascontiguousarray(a)
            if gemma and key.endswith("norm.weight"):
                a = a + np.float32(1)
            if arch == "llama" and "attn_q." in key:
                a = permute(a, config["num_attention_heads"])
            if arch == "llama" and "attn_k." in key:
                a = permute(a, config["num_key_value_heads"])
            if kind == gguf.GGMLQuantizationType.MXFP4 and key.endswith("exps.weight"):
                w.add_tensor(key, gguf.quants.quantize(a, kind), raw_dtype=kind)
                continue
            if a.ndim > 1 and kind == gguf.GGMLQuantizationType.F16 and "ffn_gate_inp" not in key:
                a = a.astype(np.float16)
            w.add_tensor(key, np.ascontiguousarray(a))
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()
        save(path, out.read_bytes())


def write_safetensors(folder, state, shards):
    meta = {"format": "pt"}
    if shards == 1:
        save(folder / "model.safetensors", safetensors_save(state, meta))
        return
    total = sum(v.numel() * v.element_size() for v in state.values())
    groups, size = [{}], 0
    for k, v in state.items():
        if size >= total / shards * len(groups):
            groups.append({})
        groups[-1][k] = v
        size += v.numel() * v.element_size()
    where = {}
    for i, group in enumerate(groups, 1):
        file = f"model-{i:05}-of-{len(groups):05}.safetensors"
        save(folder / file, safetensors_save(group, meta))
        where |= {k: file for k in group}
    save(folder / "model.safetensors.index.json", pretty({"metadata": {"total_size": total}, "weight_map": where}))


def apart(name, state):
    """The names and shapes that checkpoints of the time had: Mixtral with a matrix of each expert."""
    if name != "mixtral":
        return state
    out = {}
    for key, value in state.items():
        key = key.replace(".mlp.", ".block_sparse_moe.")
        for e in range(value.shape[0] if ".experts." in key else 0):
            base = key.rsplit(".", 1)[0] + f".{e}."
            if key.endswith("down_proj"):
                out[base + "w2.weight"] = value[e].contiguous()
            else:
                out[base + "w1.weight"], out[base + "w3.weight"] = (x.contiguous() for x in value[e].chunk(2))
        if ".experts." not in key:
            out[key] = value
    return out


def write_mxfp4(folder, source, config, state):
    """A directory as OpenAI's: experts as blocks and scales. Two neighbours share a byte."""
    shutil.rmtree(folder, ignore_errors=True)
    out = {}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        save(folder / name, (source / name).read_bytes())
    for key, value in state.items():
        if not key.endswith(("gate_up_proj", "experts.down_proj")):
            out[key] = value
            continue
        blocks = mxfp4_blocks(value)
        assert torch.equal(mxfp4_values(blocks), value.transpose(1, 2))
        codes = np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], axis=-1)
        out[key + "_blocks"] = torch.from_numpy(codes[..., ::2] | codes[..., 1::2] << 4).contiguous()
        out[key + "_scales"] = torch.from_numpy(np.ascontiguousarray(blocks[..., 0]))
    save(folder / "config.json", pretty(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    write_safetensors(folder, out, 1)


def sensitivity(name, model, case):
    """How far the logits move when something is wrong: the test must see each of these."""
    config = model.config
    ids, want = case["prompt"], torch.tensor(case["logits"])
    spread = float(want.max() - want.min())
    out = {}

    def off():
        return float((logits_of(model, ids)[case["positions"]] - want).abs().max()) / spread

    def try_attribute(label, objects, attribute, change):
        objects = [o for o in objects if getattr(o, attribute, None)]
        keep = [getattr(o, attribute) for o in objects]
        for o, value in zip(objects, keep):
            setattr(o, attribute, change(value))
        if objects:
            out[label] = off()
        for o, value in zip(objects, keep):
            setattr(o, attribute, value)

    modules = list(model.modules())
    attention = [layer.self_attn for layer in model.model.layers]
    rotary = model.model.rotary_emb
    rope = config.rope_parameters if "rope_type" in config.rope_parameters else None
    for freq in [n for n, _ in rotary.named_buffers() if n.endswith("inv_freq") and "original" not in n]:
        buffer = getattr(rotary, freq)
        keep = buffer.clone()
        d = torch.arange(0, len(keep), dtype=torch.float32) / len(keep)
        if rope and rope["rope_type"] != "default":
            buffer.copy_(rope["rope_theta"] ** -d)
            out["no rope scaling"] = off()
        buffer.copy_(keep * 1.01**-d)
        out["theta 1 % off" if rope else f"{freq} 1 % off"] = off()
        buffer.copy_(keep)
    try_attribute("epsilon x 10", modules, "variance_epsilon", lambda e: 10 * e)
    try_attribute("epsilon x 10", [m for m in modules if "Norm" in type(m).__name__], "eps", lambda e: 10 * e)
    try_attribute("window one longer", [config], "sliding_window", lambda n: n + 1)
    try_attribute("chunk one longer", [config], "attention_chunk_size", lambda n: n + 1)
    try_attribute("scores 1 % larger", attention, "scaling", lambda s: 1.01 * s)
    try_attribute("no cap of scores", attention, "attn_logit_softcapping", lambda _: None)
    try_attribute("no cap of logits", [config], "final_logit_softcapping", lambda _: None)
    try_attribute("no temperature", attention, "attn_temperature_tuning", lambda _: False)
    if config.model_type == "smollm3":
        for layer in model.model.layers:
            layer.self_attn.use_rope = 1
        out["rope in all layers"] = off()
        for i, layer in enumerate(model.model.layers):
            layer.self_attn.use_rope = config.no_rope_layers[i]
    if config.model_type == "gpt_oss":
        for m in model.modules():
            if hasattr(m, "sinks"):
                m.sinks.data -= 50
        out["no sinks"] = off()
        for m in model.modules():
            if hasattr(m, "sinks"):
                m.sinks.data += 50
        rotary.attention_scaling, keep_scaling = 1.0, rotary.attention_scaling
        out["no attention factor"] = off()
        rotary.attention_scaling = keep_scaling
        for m in model.modules():
            if hasattr(m, "limit"):
                m.limit = 1e9
        out["no clamp"] = off()
        for m in model.modules():
            if hasattr(m, "limit"):
                m.limit = config.swiglu_limit
    print("  sensitivity: " + ", ".join(f"{k} {v:.1e}" for k, v in out.items()))


def make(name, tok, sp):
    spec = SPECS[name]
    folder = MODELS / f"{name}-tiny"
    shutil.rmtree(folder, ignore_errors=True)
    config = COMMON | spec["config"]
    if config["model_type"] in ("qwen2", "qwen3", "mixtral", "qwen3_moe", "gpt_oss") or is_gemma(config["model_type"]):
        config.pop("mlp_bias")
    if config["model_type"] in ("qwen2", "mixtral"):
        config.pop("attention_bias")
    save(folder / "config.json", pretty(config))
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"], "do_sample": True}
    generation |= {"temperature": 0.6, "top_p": 0.9, "transformers_version": "5.24.0"}
    if name in ("qwen3", "qwen3moe"):
        generation |= {"top_k": 20}
    save(folder / "generation_config.json", pretty(generation))
    save(folder / "tokenizer.json", st.tokenizer_json(tok, string_merges=name in ("llama31", "qwen2", "gptoss")))
    save(folder / "tokenizer_config.json", st.tokenizer_config(**spec["tokenizer"]))

    from transformers import AutoConfig

    cfg = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(cfg, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32)
    seed = sum(name.encode())
    model = init_weights(model, spec["exact"], seed).eval()
    state = {k: v.to(spec["store"]).contiguous() for k, v in model.state_dict().items()}
    if cfg.tie_word_embeddings:
        state.pop("lm_head.weight")
    assert all(torch.equal(v.float(), model.state_dict()[k]) for k, v in state.items())
    write_safetensors(folder, apart(name, state), spec.get("shards", 1))
    if "mxfp4" in spec.get("gguf", {}):
        write_mxfp4(MODELS / f"{name}-mxfp4-tiny", folder, config, state)
    for kind in spec.get("gguf", {}):
        write_gguf(folder / f"{name}-tiny.{kind}.gguf", name, spec, state, tok, sp)

    # The reference reads the files just written.
    ref = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32).eval()
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in ref.state_dict().items())
    wide = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", experts_implementation="eager", dtype=torch.float64).eval()
    assert not hasattr(cfg, "no_rope_layers") or [m.self_attn.use_rope for m in ref.model.layers] == cfg.no_rope_layers
    text_ids = tok.encode(corpus.english(), add_special_tokens=False).ids
    hf = AutoTokenizer.from_pretrained(folder)
    assert hf(corpus.english(), add_special_tokens=False)["input_ids"] == text_ids
    print(f"{name}: {sum(v.numel() for v in state.values())} weights, text of {len(text_ids)} tokens")
    lengths = spec.get("lengths", LENGTHS)
    cases = [make_case(ref, wide, n, where, text_ids, tok.get_vocab_size()) for n, where in lengths.items()]
    sensitivity(name, ref, cases[-1])
    write_logits(GOLDEN / "logits" / f"{name}-tiny.bin", config["vocab_size"], cases)


def main():
    for name, (tok, sp) in st.model_tokenizers().items():
        if not sys.argv[1:] or name in sys.argv[1:]:
            make(name, tok, sp)


if __name__ == "__main__":
    main()
