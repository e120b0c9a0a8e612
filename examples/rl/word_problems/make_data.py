"""Make arithmetic word problems in the shape of GSM8K, and a tokenizer for them.

    python -m examples.rl.word_problems.make_data --out outputs/rl/word_problems/data [--seed 0]

Writes
  train.jsonl, held_out.jsonl
      one JSON object per line with GSM8K's keys: `question`, and `answer`, whose lines are the
      worked steps and then "#### n"; no question is in both files or twice in one
  tokenizer/
      a byte-level BPE of 512 entries in Hugging Face's files; like Qwen's, it splits numbers into
      digits, and "<|im_end|>" ends a text

The same seed gives the same problems.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

NAMES = ["Ana", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana"]
THINGS = ["apples", "books", "cards", "shells", "stamps", "coins"]
# What happens to the things, and its sign.
EVENTS = [
    ("buys {n} more", 1),
    ("finds {n} more", 1),
    ("gets {n} as a gift", 1),
    ("gives away {n}", -1),
    ("loses {n}", -1),
    ("sells {n}", -1),
]
LARGEST = 9  # number in a question; the smallest is 2
MAX_EVENTS = 2
VOCAB_SIZE = 512
END = "<|im_end|>"


def problem(rng: random.Random) -> dict[str, str]:
    """A problem with one or two steps, whose intermediate results are not below 0."""
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    total = rng.randint(2, LARGEST)
    sentences, steps = [f"{name} has {total} {things}."], []
    for _ in range(rng.randint(1, MAX_EVENTS)):
        number = rng.randint(2, LARGEST)
        event, sign = rng.choice([e for e in EVENTS if total + e[1] * number >= 0])
        sentences.append(f"{name} {event.format(n=number)}.")
        result = total + sign * number
        steps.append(f"{total}{'+' if sign > 0 else '-'}{number}={result}")
        total = result
    question = " ".join([*sentences, f"How many {things} does {name} have now?"])
    return {"question": question, "answer": "\n".join([*steps, f"#### {total}"])}


def problems(seed: int) -> Iterator[dict[str, str]]:
    """Yield problems without end, no question twice."""
    rng, seen = random.Random(seed), set()
    while True:
        row = problem(rng)
        if row["question"] not in seen:
            seen.add(row["question"])
            yield row


def write_tokenizer(folder: Path, rows: list[dict[str, str]]) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((f"{row['question']}\n{row['answer']}" for row in rows), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-train", type=int, default=8000)
    parser.add_argument("--num-held-out", type=int, default=200)
    options = parser.parse_args()
    source = problems(options.seed)
    train = [next(source) for _ in range(options.num_train)]
    held_out = [next(source) for _ in range(options.num_held_out)]
    options.out.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("held_out", held_out)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (options.out / f"{name}.jsonl").write_text(lines)
    write_tokenizer(options.out / "tokenizer", train)


if __name__ == "__main__":
    main()
