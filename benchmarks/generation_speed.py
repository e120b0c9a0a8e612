"""Tokens per CPU-second of RL's generator and of `transformers.generate`, with the same weights.

    python benchmarks/generation_speed.py [--sizes small large] [--repeats 5] [--dtype bfloat16]

32 prompts of 16 tokens are continued by 128 tokens each, sampled at temperature 1 from the whole
vocabulary; one thread. The ways take turns, after one turn to warm up, and the fastest of each
counts. `modules` is the generator without `generation.one_token`, `exact` the one of
`rl.generator.exact`. Before that, greedy continuations are compared. `small` has 0.5M parameters,
`large` 89M. bfloat16 is by autocast, for both.
"""

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from torchtitan.models.exact import use_exact
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.rl.decoding import LocalDecoder, continue_prompts
from torchtitan.rl.types import SamplingConfig

N_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 32, 16, 128
SIZES = {
    "small": dict(dim=128, n_layers=2, n_heads=4, vocab_size=512, multiple_of=32),
    "large": dict(dim=768, n_layers=8, n_heads=12, vocab_size=16384, multiple_of=64),
}


@torch.no_grad()
def make_model(size: str) -> Transformer:
    torch.manual_seed(0)
    args = TransformerModelArgs(**SIZES[size], max_seq_len=192, rope_scaling_args=None)
    model = Transformer(args)
    model.init_weights()
    return model


@torch.no_grad()
def hf_model(model: Transformer) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    args = model.model_args
    config = LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.dim,
        intermediate_size=model.layers["0"].feed_forward.w1.out_features,
        num_hidden_layers=args.n_layers,
        num_attention_heads=args.n_heads,
        num_key_value_heads=args.n_heads,
        max_position_embeddings=args.max_seq_len,
        rope_theta=args.rope_theta,
        rms_norm_eps=args.norm_eps,
        tie_word_embeddings=False,
    )
    theirs = LlamaForCausalLM(config).eval()
    weights = Llama3StateDictAdapter(args, None).to_hf(model.state_dict())
    theirs.load_state_dict(weights)
    return theirs


def ways_of(size: str, amp: Any) -> dict[str, Callable[[float], torch.Tensor]]:
    """Each takes a temperature and returns the new tokens [N_PROMPTS, NEW_TOKENS]."""
    models = [make_model(size) for _ in range(2)]
    use_exact(models[1:])
    theirs, rows = hf_model(models[0]), list(range(N_PROMPTS))
    prompts = torch.randint(SIZES[size]["vocab_size"], (N_PROMPTS, PROMPT_TOKENS))
    uniform = torch.rand(N_PROMPTS, NEW_TOKENS, dtype=torch.float64)

    def ours(model: Transformer, temperature: float) -> torch.Tensor:
        sampling = SamplingConfig(temperature=temperature, max_tokens=NEW_TOKENS)
        decoder = LocalDecoder.of_model(model, amp)
        drawn, _ = continue_prompts(decoder, prompts.tolist(), rows, uniform, sampling, 0)
        return drawn[..., 0].long()

    def modules(temperature: float) -> torch.Tensor:
        with patch("torchtitan.generation.kv_cache.is_plain", lambda _: False):
            return ours(models[0], temperature)

    @torch.no_grad()
    def reference(temperature: float) -> torch.Tensor:
        options = {"do_sample": True, "top_k": 0} if temperature else {"do_sample": False}
        options |= {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "pad_token_id": 0}
        with amp:
            mask = torch.ones_like(prompts)
            return theirs.generate(prompts, attention_mask=mask, **options)[:, PROMPT_TOKENS:]

    return {
        "torchtitan": lambda temperature: ours(models[0], temperature),
        "modules": modules,
        "exact": lambda temperature: ours(models[1], temperature),
        "transformers": reference,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    amp: Any = nullcontext()
    if args.dtype == "bfloat16":
        amp = torch.autocast("cpu", dtype=torch.bfloat16)
    for size in args.sizes:
        ways = ways_of(size, amp)
        greedy = {name: run(0.0) for name, run in ways.items()}
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(args.repeats):
            for name, run in ways.items():
                started = time.process_time()
                run(1.0)
                best[name] = min(best[name], time.process_time() - started)
        for name, seconds in best.items():
            same = (greedy[name] == greedy["transformers"]).all(1).sum()
            print(
                f"{size:6} {args.dtype:8} {name:13} {N_PROMPTS * NEW_TOKENS / seconds:8,.0f} tokens per "
                f"CPU-s, {best['transformers'] / seconds:5.2f} times transformers', greedy: {same} of "
                f"{N_PROMPTS} rows as theirs",
                flush=True,
            )


if __name__ == "__main__":
    main()
