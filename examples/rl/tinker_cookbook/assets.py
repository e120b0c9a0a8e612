"""Sums for tinker-cookbook's loops, from nothing: a model, a tokenizer, conversations.

    python examples/rl/tinker_cookbook/assets.py FOLDER

writes FOLDER/local/bytes (a Hugging Face tokenizer with one token for each byte) and
FOLDER/sums.jsonl. The server imports this module for the model (experimental.custom_import).
"""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec
from torchtitan.protocols.train_spec import register_train_spec

END = "<|end|>"
small = TransformerModelArgs(
    dim=128, n_layers=3, n_heads=4, vocab_size=257, multiple_of=32, rope_scaling_args=None
)
register_train_spec("bytes_toy", replace(get_train_spec(), model_args={"debugmodel": small}))


def write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_conversations(path: Path, n: int, largest: int) -> None:
    """As the cookbook's arithmetic environment asks: one example, then the question."""
    rng = random.Random(0)

    def turn(x: int, y: int) -> list[dict[str, str]]:
        question = {"role": "user", "content": f"What is {x} + {y}?"}
        return [question, {"role": "assistant", "content": str(x + y)}]

    with path.open("w") as lines:
        for _ in range(n):
            messages = turn(4, 5) + turn(rng.randint(0, largest), rng.randint(0, largest))
            lines.write(json.dumps({"messages": messages}) + "\n")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write_tokenizer(folder / "local" / "bytes")
    write_conversations(folder / "sums.jsonl", n=20_000, largest=100)
