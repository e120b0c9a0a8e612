"""A Llama of 0.4M parameters for tasks spelled in characters: RL on a laptop's CPU.

`torchtitan.train` trains it on solved examples of the task in `[rl.task]`; RL starts from that
checkpoint. `torchtitan.rl.train` can also start from random weights.
"""

from dataclasses import replace

from torchtitan.experiments.rl_toy.examples import SolvedExamples
from torchtitan.models.llama3 import TransformerModelArgs
from torchtitan.models.llama3 import get_train_spec as get_llama3_spec
from torchtitan.protocols.train_spec import TrainSpec

toy_args = {
    "debugmodel": TransformerModelArgs(
        dim=128, n_layers=2, n_heads=4, vocab_size=32, multiple_of=32, rope_scaling_args=None
    ),
}


def get_train_spec() -> TrainSpec:
    """Return a new spec: Llama 3 with the flavors above, without a tokenizer, and with generated data."""
    return replace(
        get_llama3_spec(),
        model_args=toy_args,
        build_tokenizer_fn=None,
        build_dataloader_fn=SolvedExamples,
        build_validator_fn=None,
    )
