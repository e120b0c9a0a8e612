"""Converts preference pairs to token ids. A pair is one document: the prompt with each of its answers."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from torchtitan.data.chats import PAIR_COLUMNS, REFERENCE_KEYS, ChatEncoder, ChatTokens, renamed
from torchtitan.data.local_files import SampleRule, load_local_documents
from torchtitan.data.open_document import Tokens, join


class PairTokens(ChatTokens):
    """Converts a sample to a document of two parts, the prompt with the chosen and the rejected answer.

    A sample has `chosen` and `rejected`, and `prompt`: all are texts, or all are lists of messages. If the
    answers are whole chats, the messages that they share at their beginning are the prompt; a `prompt`
    that is a text is ignored then. Each part is encoded as a prompt and its completion, see
    `ChatEncoder`, and has at most seq_len // 2 tokens, see `ChatTokens`.
    has_reference: samples have the reference model's log-probs of both answers, under `REFERENCE_KEYS`.
    """

    unit, what, limit = "pair", "an answer with its prompt", "half of training.seq_len"
    has_reference = False

    def __init__(self, encoder: ChatEncoder, seq_len: int, too_long: str) -> None:
        super().__init__(encoder, seq_len // 2, too_long)
        self.key = f"pairs {self.key}"

    def _read(self, sample: Mapping[str, Any]) -> tuple[Tokens, int]:
        sample = renamed(sample, self.encoder.keys)
        if problem := _problem_of(sample):
            raise ValueError(problem)
        prompt, *answers = _prompt_and_answers(sample)
        shared = {key: sample.get(key) for key in ("tools", "chat_template_kwargs")}
        parts, num_tokens = [], 0
        for answer in answers:
            ids, trained = self.encoder.encode(shared | {"prompt": prompt, "completion": answer})
            num_tokens += len(ids)
            parts.append(self._fitted(ids, trained))
        # The first token of a part is no label.
        if not all(part.trained is not None and part.trained[1:].any() for part in parts):
            return Tokens(np.empty(0, np.int32), np.empty(0, bool)), num_tokens
        pair = join(parts)._replace(split=len(parts[0].ids))
        return pair._replace(reference=self._reference(sample)), num_tokens

    def _reference(self, sample: Mapping[str, Any]) -> tuple[float, float] | None:
        if not self.has_reference:
            return None
        values = [sample.get(key) for key in REFERENCE_KEYS]
        if not all(isinstance(x, int | float) and math.isfinite(x) for x in values):
            raise ValueError(
                f"loss.reference = 'precomputed' needs the numbers {' and '.join(REFERENCE_KEYS)}, sums of an "
                f"answer's log-probs, got {values}; add them, or choose another loss.reference"
            )
        return values[0], values[1]


def _problem_of(sample: Any, keys: Mapping[str, str] | None = None) -> str | None:
    sample = renamed(sample, keys)
    if not isinstance(sample, Mapping):
        return (
            f"need an object with 'chosen' and 'rejected', got {type(sample).__name__}; correct it"
        )
    prompt, chosen, rejected = (sample.get(key) for key in ("prompt", "chosen", "rejected"))
    if chosen is None or rejected is None:
        return (
            f"a preference pair needs 'chosen' and 'rejected', got the keys {sorted(sample)}; convert the "
            "data, or name yours in training.chat_keys"
        )
    kinds = {type(chosen), type(rejected)}
    if len(kinds) > 1 or not kinds <= {str, list}:
        return (
            "'chosen' and 'rejected' must both be texts or both be lists of messages; convert one"
        )
    if isinstance(chosen, str) and not isinstance(prompt, str | list):
        return f"answers that are texts need a 'prompt', got {prompt!r:.80}; add it"
    return None


def _prompt_and_answers(sample: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    prompt, chosen, rejected = (sample.get(key) for key in ("prompt", "chosen", "rejected"))
    if isinstance(chosen, str):
        if isinstance(prompt, list):  # of messages
            chosen, rejected = ([{"role": "assistant", "content": x}] for x in (chosen, rejected))
        return prompt, chosen, rejected
    if isinstance(prompt, list):
        return prompt, chosen, rejected
    shortest = min(len(chosen), len(rejected))
    n = next((i for i in range(shortest) if chosen[i] != rejected[i]), shortest)
    if not 0 < n < shortest:
        raise ValueError(
            "'chosen' and 'rejected' without a list 'prompt' must be chats that begin with the same messages "
            f"and end with other ones, got {len(chosen)} and {len(rejected)} messages of which the first {n} "
            "are the same; give the shared messages as 'prompt', or leave out the pair"
        )
    return chosen[:n], chosen[n:], rejected[n:]


def load_pairs(path: str, keys: Mapping[str, str] | None = None) -> Any:
    """Return the samples in local files, checked by the rules of `PairTokens`. keys: see `renamed`."""
    example = '{"prompt": "...", "chosen": "...", "rejected": "..."}'
    rule = SampleRule(example, (*PAIR_COLUMNS, *(keys or ())), partial(_problem_of, keys=keys))
    return load_local_documents(path, rule)
