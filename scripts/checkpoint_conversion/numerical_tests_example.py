"""Compare our logits with those of Hugging Face transformers, for one folder of weights.

    python -m scripts.checkpoint_conversion.numerical_tests_example HF_FOLDER \\
        --model_name llama3 --model_flavor 8B [--checkpoint STEP_FOLDER]

Both models run in fp32, on the CPU, on the same random tokens. The conversion is right if the KL
divergence is about 1e-12 and the largest difference of log-probabilities 1e-5; a wrong one is many
orders of magnitude off. Ends with exit code 1 above --tolerance.
"""

import argparse
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from scripts.generate._loading import load_model
from torchtitan.config import JobConfig
from torchtitan.config.checks import check_flavor
from torchtitan.job import find_train_spec
from torchtitan.tools.errors import RunError
from torchtitan.tools.logging import init_logger, logger


@dataclass(frozen=True)
class Comparison:
    """Of log-probabilities [B, T, V], theirs and ours.

    kl_divergence: mean over tokens, in nats. max_difference: of any log-probability.
    same_likeliest: share of tokens whose likeliest successor is the same.
    """

    kl_divergence: float
    max_difference: float
    same_likeliest: float

    def __str__(self) -> str:
        return (
            f"KL divergence (mean over tokens)        {self.kl_divergence:.2e} nats\n"
            f"largest difference of log-probabilities {self.max_difference:.2e}\n"
            f"same likeliest token                    {self.same_likeliest:.2%}"
        )


def compare_logits(theirs: Tensor, ours: Tensor) -> Comparison:
    """theirs, ours: logits [B, T, V]; compared in fp64, where rounding does not add up."""
    log_p, log_q = (logits.double().log_softmax(dim=-1) for logits in (theirs, ours))
    return Comparison(
        kl_divergence=(log_p.exp() * (log_p - log_q)).sum(dim=-1).mean().item(),
        max_difference=(log_p - log_q).abs().max().item(),
        same_likeliest=(theirs.argmax(-1) == ours.argmax(-1)).double().mean().item(),
    )


@torch.no_grad()
def hf_logits(folder: str, tokens: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False
    )
    return model.eval()(tokens).logits


@torch.no_grad()
def our_logits(folder: str, model_name: str, model_flavor: str, tokens: Tensor) -> Tensor:
    """Logits [B, T, V] of the model whose weights are in `folder`, our own or Hugging Face's.

    Raises ValueError if they are not of this model and flavor.
    """
    config = JobConfig()
    config.model.name, config.model.flavor = model_name, model_flavor
    config.training.seq_len = tokens.shape[1]
    config.model.attn_mask_type = "causal"  # each row is one text
    spec = find_train_spec(config)
    check_flavor(config, spec)
    if spec.model_args[model_flavor].attn_type == "varlen":  # which needs documents
        config.model.attn_type = "flex"
    model = load_model(config, spec, folder, torch.device("cpu"))
    masks = {}
    if model.model_args.attn_type != "sdpa":
        masks["attention_masks"] = model.get_attention_masks(tokens, None)
    return model(tokens, **masks)


def numerical_test(
    hf_folder: str,
    model_name: str,
    model_flavor: str,
    checkpoint: str | None = None,
    batch_size: int = 2,
    seq_len: int = 64,
) -> Comparison:
    """Compare transformers on `hf_folder` with our model on `checkpoint`, or on the same files."""
    from transformers import AutoConfig

    text_config = AutoConfig.from_pretrained(hf_folder, trust_remote_code=False).get_text_config()
    generator = torch.Generator().manual_seed(0)
    shape = (batch_size, seq_len)
    tokens = torch.randint(0, text_config.vocab_size, shape, generator=generator)
    logger.info("running transformers on %s", hf_folder)
    theirs = hf_logits(hf_folder, tokens)
    logger.info("running %s %s on %s", model_name, model_flavor, checkpoint or hf_folder)
    ours = our_logits(checkpoint or hf_folder, model_name, model_flavor, tokens)
    if theirs.shape != ours.shape:
        raise ValueError(
            f"transformers gives logits of shape {tuple(theirs.shape)}, and {model_name} "
            f"{model_flavor} of {tuple(ours.shape)}; choose the --model_flavor of these weights"
        )
    return compare_logits(theirs, ours)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("hf_folder", help="folder with config.json and *.safetensors")
    parser.add_argument("--model_name", default="llama3")
    parser.add_argument("--model_flavor", default="8B")
    parser.add_argument("--checkpoint", help="our converted checkpoint; default: the HF files")
    parser.add_argument("--batch_size", type=int, default=2)
    parser.add_argument("--seq_len", type=int, default=64)
    parser.add_argument(
        "--tolerance", type=float, default=1e-3, help="for the largest difference (default 1e-3)"
    )
    options = vars(parser.parse_args())
    tolerance = options.pop("tolerance")
    init_logger()
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    try:
        comparison = numerical_test(**options)
    except (ValueError, OSError, ImportError, RunError) as error:
        raise SystemExit(f"error: {error}") from error
    print(comparison)
    # Written so that nan fails, too.
    if not comparison.max_difference <= tolerance:
        raise SystemExit(f"the models differ by more than {tolerance:g}")


if __name__ == "__main__":
    main()
