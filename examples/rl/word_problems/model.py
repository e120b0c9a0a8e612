"""A Qwen 3 of 0.5M parameters, `model.name = "word_problems"`, for the recipe on a CPU."""

from dataclasses import replace

from torchtitan.models.qwen3 import Qwen3ModelArgs, get_train_spec
from torchtitan.protocols.train_spec import register_train_spec

ARGS = Qwen3ModelArgs(
    dim=128,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    head_dim=32,
    hidden_dim=256,
    vocab_size=512,
    max_seq_len=128,
    rope_theta=10_000,
    eos_id=0,
    enable_weight_tying=True,
)
register_train_spec("word_problems", replace(get_train_spec(), model_args={"debugmodel": ARGS}))
