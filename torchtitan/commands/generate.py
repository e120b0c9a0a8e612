"""Continue prompts with a model, or chat with it. Text goes to stdout, everything else to stderr."""

import itertools
import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from torchtitan.callbacks.metrics import build_device_memory_monitor, memory_metrics
from torchtitan.commands import SourceParser, errors_as_sentences
from torchtitan.commands.source import job_of, open_engine, weights_in
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.data.chat_template import ChatTemplate
from torchtitan.data.tokenizer import BaseTokenizer
from torchtitan.generation.sampling import end_ids, stream
from torchtitan.job import find_train_spec
from torchtitan.tools.files import read_text
from torchtitan.tools.logging import logger


def main() -> None:
    parser = SourceParser("torchtitan generate", __doc__)
    add = parser.add_argument
    add("--prompt", action="append", default=[], help="text to continue; may be repeated")
    add("--prompts", metavar="FILE", help="a file with one prompt on each line")
    add("--chat", action="store_true", help="read a user's turns from stdin; needs a chat template")
    add("--max_new_tokens", type=int, default=128)
    add("--batch_size", type=int, default=1, help="number of continuations per prompt")
    add("--temperature", type=float, default=1.0, help="0: always the likeliest token")
    add("--top_k", type=int, help="draw from this many of the likeliest tokens")
    add("--seed", type=int, help="the same seed gives the same text")
    add("--deterministic", action="store_true", help="deterministic kernels only")
    add("--ignore_eos", action="store_true", help="continue after the end-of-text token")
    add("--out", action="store_true", help="print a JSON report in place of the text")
    options, overrides = parser.options_and_overrides()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logger.setLevel(logging.WARNING)
    with errors_as_sentences():
        if options.batch_size < 1:
            raise ValueError(f"--batch_size must be at least 1, got {options.batch_size}")
        config = job_of(options.source, options.config, overrides)
        weights = weights_in(options.source, config)
        print(f"weights: {weights}", file=sys.stderr)
        config.debug.deterministic |= options.deterministic
        spec = find_train_spec(config)
        if spec.build_tokenizer_fn is None:
            raise ValueError(f"model {config.model.name} comes without a tokenizer")
        tokenizer = spec.build_tokenizer_fn(config)
        prompts = options.prompt
        if options.prompts:
            prompts += read_text(options.prompts).splitlines()
        monitor = build_device_memory_monitor()
        with open_engine(config, weights) as engine:
            model, dtype = engine.model_parts[0], TORCH_DTYPE_MAP[config.training.dtype]
            # The frozen base of adapters may have another dtype.
            for parameter in model.parameters():
                parameter.data = parameter.data.to(dtype)
            ends = end_ids(config.model.hf_assets_path)
            ends += [tokenizer.eos_id] if tokenizer.eos_id not in (None, *ends) else []

            def draw(prompt: list[int]) -> Iterator[list[int]]:
                """Return an iterator that gives, per step, the next token of each continuation."""
                if max(prompt) >= model.vocab_size:
                    raise ValueError(
                        f"the tokenizer in model.hf_assets_path gives token {max(prompt)}, and the model "
                        f"has {model.vocab_size} tokens only; set model.hf_assets_path to the model's folder"
                    )
                drawn = stream(
                    model,
                    torch.tensor(prompt, device=engine.device).repeat(options.batch_size, 1),
                    max_new_tokens=options.max_new_tokens,
                    temperature=options.temperature,
                    top_k=options.top_k,
                    seed=options.seed,
                    eos_id=None if options.ignore_eos else ends or None,
                )
                return (tokens.flatten().tolist() for tokens in drawn)

            if options.chat:
                chat(tokenizer, config.training.chat_template or "", ends, draw)
                return
            responses, metadata = [], {}
            for prompt in prompts or [""]:
                answers, metadata = _answer(tokenizer, prompt, draw, shows=not options.out)
                responses += answers
        if options.out:
            memory = monitor.get_peak_stats()
            metadata |= {
                "batch_size": options.batch_size,
                "seed": options.seed,
                "timestamp": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                **memory_metrics(memory),
                "memory/num_alloc_retries": memory.num_alloc_retries,
                "memory/num_ooms": memory.num_ooms,
                "world_size": 1,
                "torch_version": torch.__version__,
            }
            print(json.dumps({"metadata": metadata, "responses": responses}, indent=2))


def _answer(
    tokenizer: BaseTokenizer,
    prompt: str,
    draw: Callable[[list[int]], Iterator[list[int]]],
    shows: bool,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return (continuations, counts and times). shows: print the texts, the first while it is generated."""
    begins = getattr(tokenizer, "begins_documents", True)
    ids = tokenizer.encode(prompt, add_bos=begins, add_eos=False)
    if not ids:
        raise ValueError(
            "an empty --prompt needs a tokenizer with a begin-of-text token, and this tokenizer has none; "
            "give --prompt a string"
        )
    started = time.monotonic()
    drawn, shown = itertools.tee(draw(ids))
    tokens = (of_rows[0] for of_rows in shown)
    # Raises, before any output, if an option is out of range.
    first = next(tokens)
    for piece in pieces_of(tokenizer, ids, itertools.chain([first], tokens)):
        print(piece, end="", flush=True) if shows else None
    seconds = time.monotonic() - started
    rows = [[*row] for row in zip(*drawn, strict=True)]
    start = tokenizer.decode(ids)
    texts = [tokenizer.decode(ids + row)[len(start) :] for row in rows]
    if shows:
        print("\n", *(f"{start}{text}\n" for text in texts[1:]), sep="\n" if texts[1:] else "")
        print(f"{len(rows[0])} tokens after {len(ids)} in {seconds:.2f} s", file=sys.stderr)
    responses = [
        {"response_idx": i, "input_text": start, "output_text": text}
        for i, text in enumerate(texts)
    ]
    n_tokens = len(rows) * (len(ids) + len(rows[0]))
    return responses, {
        "generated_n_tokens": len(rows[0]),
        "input_n_tokens": len(ids),
        "generation_time_sec": seconds,
        "tokens_per_sec": n_tokens / seconds,
    }


def pieces_of(tokenizer: BaseTokenizer, prompt: list[int], tokens: Iterable[int]) -> Iterator[str]:
    """Yield the prompt's text, then the text of the tokens in pieces that end with a whole character."""
    ids, shown = list(prompt), ""
    for token in itertools.chain([None], tokens):
        ids += [] if token is None else [token]
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):  # U+FFFD: the last character is incomplete
            yield text[len(shown) :]
            shown = text


def chat(
    tokenizer: Any,
    template_path: str,
    ends: list[int],
    draw: Callable[[list[int]], Iterator[list[int]]],
) -> None:
    """Answer each line of stdin as a user's turn. ends: token ids that end a reply, besides the template's."""
    template = ChatTemplate.of_tokenizer(tokenizer, path=template_path)
    if template is None:
        raise ValueError(
            f"--chat needs a chat template, and {tokenizer.tokenizer_path} has none; give one with "
            "--training.chat_template FILE"
        )
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    token = template.token_at_end(template.render(turns, add_generation_prompt=False))
    end_of_turn = None if token is None else tokenizer.token_to_id(token)
    ends += [end_of_turn] if end_of_turn not in (None, *ends) else []
    messages: list[dict[str, str]] = []
    is_terminal = sys.stdin.isatty()
    while True:
        print("> " * is_terminal, end="", flush=True)
        if not (line := sys.stdin.readline()):
            return
        messages.append({"role": "user", "content": line.rstrip("\n")})
        ids = tokenizer.encode(template.render(messages), add_special_tokens=False)
        pieces = pieces_of(tokenizer, ids, (of_rows[0] for of_rows in draw(ids)))
        next(pieces)  # skip the text of the chat so far
        reply = ""
        for piece in pieces:
            reply += piece
            print(piece, end="", flush=True)
        print()
        messages.append({"role": "assistant", "content": reply})


if __name__ == "__main__":
    main()
