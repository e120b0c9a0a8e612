"""Log-probabilities and entropies of texts, without gradients and without logits of whole rows."""

import torch

from torchtitan.components.logprobs import TokenLogProbs
from torchtitan.config import job_config as config
from torchtitan.engine import TrainingEngine

job = config.JobConfig(
    model=config.Model(
        name="qwen3", flavor="debugmodel", attn_type="flex", attn_mask_type="position_block_causal"
    ),
    training=config.Training(mixed_precision_param="float32"),
)


def batch_of(tokens):
    """A text as a row; -100 where there is nothing to predict. Rows may be packed, too."""
    labels = torch.cat((tokens[1:], torch.tensor([-100])))
    positions = torch.arange(len(tokens))
    return {"input": tokens[None], "labels": labels[None], "positions": positions[None]}


def score(outputs, batch):
    """Runs where the outputs are, microbatch by microbatch; what it returns is all that is kept."""
    is_predicted = batch["labels"] >= 0
    perplexity = (-outputs.logprobs.sum() / is_predicted.sum()).exp()
    return perplexity.item(), outputs.entropy[is_predicted].mean().item()


with TrainingEngine(job) as engine, engine.eval_mode():
    texts = [torch.randint(0, 2048, (n,)) for n in (33, 5, 80)]
    scores = engine.forward_step(
        [batch_of(tokens) for tokens in texts], head=TokenLogProbs(entropy=True), output_fn=score
    )
    for tokens, (perplexity, entropy) in zip(texts, scores or [], strict=False):
        print(f"{len(tokens):3} tokens: perplexity {perplexity:.0f}, entropy {entropy:.2f} nats")
