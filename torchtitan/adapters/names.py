"""Names of layers, as PEFT and Hugging Face have them and as ours are, in one spelling.

A name in the config is a run of whole components of a layer's name, in either spelling: `q_proj`,
`wq`, `self_attn.q_proj`, `mlp`, `layers.0`, `model.layers.0.self_attn.q_proj`. PEFT's rule, the last
components, is a part of this one.
"""

from collections.abc import Iterable

_SPELLINGS = {
    "self_attn": "attention",
    "q_proj": "wq",
    "k_proj": "wk",
    "v_proj": "wv",
    "o_proj": "wo",
    "q_a_proj": "wq_a",
    "q_b_proj": "wq_b",
    "kv_a_proj_with_mqa": "wkv_a",
    "kv_b_proj": "wkv_b",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
    "mlp": "feed_forward",
    "moe": "feed_forward",
    "shared_expert": "shared_experts",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "embed_tokens": "tok_embeddings",
    "lm_head": "output",
}


def spelled(name: str) -> str:
    return ".".join(_SPELLINGS.get(part, part) for part in name.removeprefix("model.").split("."))


def fits(pattern: str, name: str) -> bool:
    """True if the pattern is a run of whole components of the layer's name."""
    return f".{spelled(pattern)}." in f".{spelled(name)}."


def first_fit(patterns: Iterable[str], name: str) -> str | None:
    """Return the first pattern that fits, or None."""
    return next((pattern for pattern in patterns if fits(pattern, name)), None)
