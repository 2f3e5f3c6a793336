"""The tiny models whose layers differ: windows, chunks, rope of two kinds. Rows for make_models.SPECS.

Windows are small, prompts many windows long. What real models share by chance (a scale of 1 / sqrt(head_dim), caps that
hardly matter) is made to differ here, so that a reader that ignores it is found out.
"""

import gguf
import torch

import small_tokenizers as st

F32 = {"f32": gguf.GGMLQuantizationType.F32}
GEMMA_TOKENIZER = {"bos": "<bos>", "eos": "<eos>", "pad": "<pad>", "chat_template": st.GEMMA_CHAT, "add_bos": True}
GEMMA_IDS = {"bos_token_id": 2, "eos_token_id": [1, 511], "pad_token_id": 0}
LENGTHS = {
    5: [0, 1, 2, 3, 4],
    37: [0, 15, 16, 23, 24, 25, 36],
    330: [0, 23, 24, 48, 127, 128, 329],
}

SPECS = {
    "gemma2": {
        "store": torch.float32,
        "exact": torch.float32,
        "gguf": F32,
        "lengths": LENGTHS,
        "config": {
            "architectures": ["Gemma2ForCausalLM"],
            "model_type": "gemma2",
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 8.0,
            "sliding_window": 24,
            "vocab_size": 512,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "torch_dtype": "float32",
            **GEMMA_IDS,
        },
        "tokenizer": GEMMA_TOKENIZER,
    },
    "gemma3": {
        "store": torch.float32,
        "exact": torch.float32,
        "gguf": F32,
        "lengths": LENGTHS,
        "config": {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 7,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "sliding_window": 24,
            "sliding_window_pattern": 6,
            "vocab_size": 512,
            "rms_norm_eps": 1e-5,
            "rope_theta": 2000.0,
            "rope_local_base_freq": 200.0,
            "rope_scaling": {"factor": 2.0, "rope_type": "linear"},
            "torch_dtype": "float32",
            **GEMMA_IDS,
        },
        "tokenizer": GEMMA_TOKENIZER,
    },
    "mistral-swa": {
        "store": torch.float32,
        "exact": torch.float32,
        "lengths": LENGTHS,
        "config": {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 24,
            "vocab_size": 512,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": "float32",
        },
        "tokenizer": {"bos": "<s>", "eos": "</s>", "chat_template": st.MISTRAL_CHAT, "add_bos": True},
    },
    "qwen3-swa": {
        "store": torch.float32,
        "exact": torch.float32,
        "lengths": LENGTHS,
        "config": {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_window_layers": 2,
            "use_sliding_window": True,
            "sliding_window": 24,
            "rms_norm_eps": 1e-6,
            "vocab_size": 512,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": True,
            "bos_token_id": 507,
            "eos_token_id": 509,
            "torch_dtype": "float32",
        },
        "tokenizer": {"eos": "<|im_end|>", "pad": "<|endoftext|>", "chat_template": st.CHATML},
    },
}
