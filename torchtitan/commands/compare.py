"""Compare a model's logits with those of transformers. Exit code 1 above --tolerance.

Both models run in fp32, on the same tokens. After a correct conversion log-probabilities differ only by
rounding, about 1e-5; after a wrong conversion by orders of magnitude more.
"""

import tempfile

import torch
from torch import Tensor

from torchtitan.checkpoint.folder import Contents, contents_of
from torchtitan.commands import SourceParser, errors_as_sentences
from torchtitan.commands.source import job_of, open_engine, weights_in
from torchtitan.job import find_train_spec
from torchtitan.tools import storage
from torchtitan.tools.logging import init_logger, logger


def compare_logits(theirs: Tensor, ours: Tensor) -> tuple[float, str]:
    """Compare logits [B, T, V] in fp64, whose rounding errors are negligible.

    Returns (the largest difference of log-probabilities, a report of all differences).
    """
    if theirs.shape != ours.shape:
        raise ValueError(
            f"transformers gives logits of shape {tuple(theirs.shape)}, and this model of "
            f"{tuple(ours.shape)}; give the weights of one model"
        )
    theirs, ours = theirs.double(), ours.double()
    log_p, log_q = theirs.log_softmax(dim=-1), ours.log_softmax(dim=-1)
    logits, logprobs = ((a - b).abs().max().item() for a, b in ((theirs, ours), (log_p, log_q)))
    divergence = (log_p.exp() * (log_p - log_q)).sum(dim=-1).mean().item()
    n, others = theirs[..., 0].numel(), (theirs.argmax(-1) != ours.argmax(-1)).nonzero().tolist()
    where = f"; not at (row, position) {others[:8]}" if others else ""
    return logprobs, (
        f"largest difference of logits            {logits:.2e}\n"
        f"largest difference of log-probabilities {logprobs:.2e}\n"
        f"KL divergence (mean over tokens)        {divergence:.2e} nats\n"
        f"same likeliest token                    {n - len(others)} of {n} positions{where}"
    )


@torch.no_grad()
def hf_logits(folder: str, tokens: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False
    )
    return model.eval()(tokens).logits


def main() -> None:
    parser = SourceParser("torchtitan compare", __doc__)
    add = parser.add_argument
    add("--with", dest="reference", metavar="FOLDER", help="the folder that transformers opens; default: "
        "SOURCE, exported first if it is a checkpoint")  # fmt: skip
    add("--checkpoint", metavar="FOLDER", help="weights of our model, if not those in SOURCE")
    add("--tokens", help="token ids, such as 1,5,7 (default: random ones)")
    add("--batch_size", type=int, default=2, help="number of random rows")
    add("--seq_len", type=int, default=64, help="number of random tokens per row")
    add("--tolerance", type=float, default=1e-3, help="of log-probabilities (default 1e-3)")
    options, overrides = parser.options_and_overrides()
    init_logger()
    with errors_as_sentences():
        named = options.reference
        if named and not storage.is_file(storage.join(named, "config.json")):
            raise ValueError(
                f"--with must be a transformers folder with a config.json, got {named!r}; correct the path"
            )
        config = job_of(options.source, options.config, overrides)
        weights = weights_in(options.checkpoint or options.source, config)
        # Each row is one document.
        config.model.attn_mask_type = "causal"
        args = find_train_spec(config).model_args.get(config.model.flavor)
        if (config.model.attn_type or getattr(args, "attn_type", None)) == "varlen":
            # varlen attention needs document boundaries.
            config.model.attn_type = "flex"
        dtype = config.training.mixed_precision_param
        if "lora" in config.model.converters and dtype != "float32":
            raise ValueError(
                f"the base of these adapters has training.mixed_precision_param = {dtype!r}, and logits are "
                "compared in float32; merge the adapters with `torchtitan export`, and compare that folder"
            )
        config.training.mixed_precision_param = "float32"
        with open_engine(config, weights) as engine, tempfile.TemporaryDirectory() as folder:
            if options.tokens:
                tokens = torch.tensor([[int(token) for token in options.tokens.split(",")]])
            else:
                shape = (options.batch_size, options.seq_len)
                generator = torch.Generator().manual_seed(0)
                tokens = torch.randint(0, engine.model_args.vocab_size, shape, generator=generator)
            logger.info("running torchtitan's %s on %s", config.model.name, weights)
            (ours,) = engine.forward_step([{"input": tokens}])
            reference = named or (options.checkpoint and options.source) or weights
            if not named and contents_of(reference) != Contents.HF:
                engine.save_hf(reference := folder)
            logger.info("running transformers on %s", reference)
            theirs = hf_logits(storage.fetched(reference), tokens)
            difference, report = compare_logits(theirs, ours.cpu())
    print(report)
    # Not `>`, so that nan fails too.
    if not difference <= options.tolerance:
        raise SystemExit(f"the models differ by more than {options.tolerance:g}")


if __name__ == "__main__":
    main()
