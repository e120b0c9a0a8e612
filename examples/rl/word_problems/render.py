"""Render problems in GSM8K's shape as texts for training.

    python -m examples.rl.word_problems.render --template plain IN.jsonl OUT.jsonl

Lines of IN are JSON objects with `question` and `answer`. OUT has them, too, with two more keys:
`prompt`, which the policy completes, and `text`, prompt and answer, which it can be fine-tuned on.
"""

import argparse
import json
from pathlib import Path

TEMPLATES = {
    "plain": "{question}\n",
    # Qwen 3's chat, with its thinking turned off: a completion of a few hundred tokens is enough.
    "qwen3": (
        "<|im_start|>user\n{question}\nWork it out step by step, and end with one line: "
        "#### and the number.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    ),
}


def render(row: dict, template: str) -> dict:
    # Not str.format: a question may have braces.
    prompt = TEMPLATES[template].replace("{question}", row["question"])
    return row | {"prompt": prompt, "text": prompt + row["answer"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--template", choices=TEMPLATES, required=True)
    parser.add_argument("source", type=Path, metavar="IN.jsonl")
    parser.add_argument("target", type=Path, metavar="OUT.jsonl")
    options = parser.parse_args()
    rows = []
    for number, line in enumerate(options.source.read_text("utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(render(json.loads(line), options.template))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            parser.error(
                f"{options.source}, line {number}: must be a JSON object with the texts `question` "
                f"and `answer`: {type(error).__name__}: {error}"
            )
    options.target.parent.mkdir(parents=True, exist_ok=True)
    options.target.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


if __name__ == "__main__":
    main()
