"""A model small enough for a laptop, two tasks for it, and the reward of one of them.

    python examples/verl/toy.py FOLDER

writes FOLDER/model (a Qwen3 of 0.1 million random weights, with a tokenizer of single characters),
FOLDER/sums for examples/verl/sft.sh, and FOLDER/vowels for examples/verl/grpo.sh, in which an answer
earns its share of vowels (`compute_score`): a train.parquet and a val.parquet each.
"""

import argparse
import random
import string
from pathlib import Path
from typing import Any

CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> float:
    """The share of vowels in an answer of up to 12 characters. verl calls it."""
    return sum(character in ground_truth for character in solution_str) / 12


def make_toy(folder: Path) -> None:
    """Fill FOLDER. Takes a few seconds."""
    make_model(folder / "model", make_tokenizer(folder / "model"))
    for task, rows, n_train in (("sums", sums(), 64), ("vowels", vowels(), 320)):
        write_rows(folder / task / "train.parquet", rows[:n_train])
        write_rows(folder / task / "val.parquet", rows[n_train:])


def make_tokenizer(folder: Path) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {character: i for i, character in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        # No token types: verl would take them for those of images, and only for some samples.
        model_input_names=["input_ids", "attention_mask"],
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
    return wrapped


def make_model(folder: Path, tokenizer: Any) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=128,  # of which the tokenizer has 99: tensor parallelism divides it
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        # No padding token: its embedding would be zero, the norm of which has a huge gradient, and
        # at the beginning this model says it, too.
        pad_token_id=None,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def sums() -> list[dict[str, Any]]:
    """80 talks about sums of two numbers."""
    pairs = [(a, b) for a in range(8) for b in range(10)]
    random.Random(0).shuffle(pairs)
    return [
        {
            "messages": [
                {"role": "user", "content": f"What is {a} plus {b}?"},
                {"role": "assistant", "content": f"{a} and {b} make {a + b}. " * (a % 3 + 1)},
            ]
        }
        for a, b in pairs
    ]


def vowels() -> list[dict[str, Any]]:
    """336 prompts that ask for vowels."""
    rng = random.Random(0)
    return [
        {
            "data_source": "vowels",
            "prompt": [{"role": "user", "content": f"vowels {rng.randrange(1000)}"}],
            "ability": "toy",
            "reward_model": {"style": "rule", "ground_truth": "aeiou"},
            "extra_info": {"index": i},
        }
        for i in range(336)
    ]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    import pandas

    path.parent.mkdir(parents=True, exist_ok=True)
    pandas.DataFrame(rows).to_parquet(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    make_toy(parser.parse_args().folder)
