"""Answer held-out chats greedily, and count the answers that are exactly right.

    python -m examples.sft.evaluate held_out.jsonl HF_FOLDER [HF_FOLDER ...]

Prints one line per task for each folder, whose own chat template renders the prompts.
"""

import argparse
import json
from collections import Counter, defaultdict
from pathlib import Path

import torch

from torchtitan.config import job_config as config
from torchtitan.data.chat_template import ChatTemplate
from torchtitan.data.tokenizer import HuggingFaceTokenizer
from torchtitan.engine import TrainingEngine
from torchtitan.generation.sampling import generate

MAX_NEW_TOKENS = 64


def answers(folder: str, chats: list[dict]) -> list[str]:
    """Return the model's answer to each chat without its last message."""
    tokenizer = HuggingFaceTokenizer(folder)
    template = ChatTemplate.of_tokenizer(tokenizer)
    if template is None:
        raise ValueError(f"{folder!r} has no chat template; add a chat_template.jinja to it")
    prompts_by_length = defaultdict(list)  # `generate` takes rows of one length
    for number, chat in enumerate(chats):
        prompt = template.render(chat["messages"][:-1])
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        prompts_by_length[len(ids)].append((number, ids))
    longest = max(prompts_by_length) + MAX_NEW_TOKENS
    training = config.Training(seq_len=longest, mixed_precision_param="float32")
    job = config.JobConfig(training=training)
    engine = TrainingEngine.from_hf(folder, job, forward_only=True)
    engine.eval_mode()
    texts = [""] * len(chats)
    for length, prompts in prompts_by_length.items():
        rows = torch.tensor([ids for _, ids in prompts], device=engine.device)
        options = {"max_new_tokens": MAX_NEW_TOKENS, "temperature": 0, "eos_id": tokenizer.eos_id}
        written = generate(engine.model_parts[0], rows, **options)[:, length:].tolist()
        for (number, _), ids in zip(prompts, written, strict=True):
            texts[number] = tokenizer.decode(ids, skip_special_tokens=True)
    engine.close()
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("chats", type=Path, metavar="CHATS.jsonl")
    parser.add_argument("folders", nargs="+", metavar="HF_FOLDER")
    options = parser.parse_args()
    chats = [json.loads(line) for line in options.chats.read_text("utf-8").splitlines()]
    num_chats = Counter(chat["task"] for chat in chats)
    for folder in options.folders:
        pairs = zip(chats, answers(folder, chats), strict=True)
        exact = Counter(
            chat["task"] for chat, text in pairs if text == chat["messages"][-1]["content"]
        )
        for task, number in num_chats.items():
            share = exact[task] / number
            print(f"{folder} {task}: {exact[task]} of {number} exact ({share:.1%})")


if __name__ == "__main__":
    main()
