"""Make chats with two tasks, and the files of a small Hugging Face model that has no weights yet.

    python -m examples.sft.make_data --out outputs/sft/data [--seed 0]

Writes
  train.jsonl, held_out.jsonl
      one chat per line: `messages`, and `task`, which is "sum" or "format"; no question is in both
      files or twice in one
  questions.jsonl
      the questions of train.jsonl as plain texts, without answers
  model/
      config.json of a Qwen 3 of 0.4M parameters, a byte-level BPE of 512 entries that splits numbers
      into digits, and a ChatML template with {% generation %} marks

The same seed gives the same files.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

WORDS = (
    "apple bread chair cloud eagle grape house lemon mouse night ocean paper "
    "queen river stone table tiger train uncle water"
).split()
FORMS: dict[str, Callable[[list[str]], str]] = {
    "as a JSON list": json.dumps,
    "in capitals": lambda words: " ".join(words).upper(),
    "as a numbered list": lambda words: "\n".join(f"{i}. {w}" for i, w in enumerate(words, 1)),
}
END = "<|im_end|>"
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", END]
TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}
{{- message.content + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": SPECIAL_TOKENS.index(END),
}


def sum_chat(rng: random.Random) -> tuple[str, str]:
    """Return (question, answer) of a sum of two numbers of two digits, worked out by columns."""
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    ones = a % 10 + b % 10
    tens = a // 10 + b // 10 + ones // 10
    steps = f"{a % 10}+{b % 10}={ones}, {a // 10}+{b // 10}+{ones // 10}={tens}"
    return f"What is {a} + {b}?", f"{steps}, so {a + b}"


def format_chat(rng: random.Random) -> tuple[str, str]:
    """Return (question, answer) of two or three words to be written in one of `FORMS`."""
    words, form = rng.sample(WORDS, rng.randint(2, 3)), rng.choice(list(FORMS))
    return f"Write {', '.join(words)} {form}.", FORMS[form](words)


TASKS = {"sum": sum_chat, "format": format_chat}


def chats(seed: int) -> Iterator[dict]:
    """Yield chats of both tasks by turns without end, no question twice."""
    rng, seen = random.Random(seed), set()
    while True:
        for task, make in TASKS.items():
            question, answer = make(rng)
            while question in seen:
                question, answer = make(rng)
            seen.add(question)
            turns = [("user", question), ("assistant", answer)]
            yield {
                "task": task,
                "messages": [{"role": role, "content": content} for role, content in turns],
            }


def write_model_files(folder: Path, texts: list[str]) -> None:
    """Write config, tokenizer and chat template; the tokenizer is trained on the texts."""
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
        vocab_size=CONFIG["vocab_size"],
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"eos_token": END, "pad_token": SPECIAL_TOKENS[0]}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-train", type=int, default=4000)
    parser.add_argument("--num-held-out", type=int, default=200)
    options = parser.parse_args()
    source = chats(options.seed)
    train = [next(source) for _ in range(options.num_train)]
    held_out = [next(source) for _ in range(options.num_held_out)]
    questions = [{"text": chat["messages"][0]["content"]} for chat in train]
    options.out.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("held_out", held_out), ("questions", questions)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (options.out / f"{name}.jsonl").write_text(lines)
    texts = [message["content"] for chat in train for message in chat["messages"]]
    write_model_files(options.out / "model", texts)


if __name__ == "__main__":
    main()
