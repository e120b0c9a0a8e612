"""Log-probabilities and entropies of texts, without gradients and without logits of whole rows."""

import torch

from torchtitan.config import job_config as config
from torchtitan.engine import TrainingEngine
from torchtitan.loss.logprobs import TokenLogProbs

job = config.JobConfig(
    model=config.Model(
        name="llama3", flavor="debugmodel", attn_type="flex", attn_mask_type="position_block_causal"
    ),
    training=config.Training(mixed_precision_param="float32"),
)


def batch_of(tokens):
    """A text as a row; -100 where there is nothing to predict. Rows may be packed, too."""
    labels = torch.cat((tokens[1:], torch.tensor([-100])))
    positions = torch.arange(len(tokens))
    return {"input": tokens[None], "labels": labels[None], "positions": positions[None]}


with TrainingEngine(job) as engine, engine.eval_mode():
    torch.manual_seed(engine.dp_rank)  # ranks that share a batch draw the same one
    texts = [torch.randint(0, 2048, (n,)) for n in (33, 5, 80)]
    # Numbers per token, [1, T] each, which every layout brings together. An output_fn would see a
    # microbatch as soon as it is computed: under context parallelism this rank's tokens of it.
    outputs = engine.forward_step(
        [batch_of(tokens) for tokens in texts], head=TokenLogProbs(entropy=True)
    )
    # None on pipeline ranks without the last stage, and from here on the same everywhere.
    outputs = engine.from_last_stage(outputs)
    for tokens, (logprobs, entropy) in zip(texts, outputs, strict=True):
        perplexity, entropy = (-logprobs[0, :-1].mean()).exp(), entropy[0, :-1].mean()
        print(f"{len(tokens):3} tokens: perplexity {perplexity:.0f}, entropy {entropy:.2f} nats")
