"""Converts preference pairs to token ids. A pair is one document: the prompt with each of its answers."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from torchtitan.data.chat_samples import REFERENCE_KEYS, renamed
from torchtitan.data.chats import ChatEncoder, ChatTokens
from torchtitan.data.open_document import Tokens, join


class PairTokens(ChatTokens):
    """Converts a sample to a document of two parts, the prompt with the chosen and the rejected answer.

    A sample has `prompt`, `chosen` and `rejected`: all strings, or all lists of messages. Answers that are
    lists may begin with the prompt's messages. If the answers are lists and `prompt` is a string or missing,
    the messages that both answers begin with are used as the prompt. Each part has at most seq_len // 2
    tokens; see `ChatEncoder`.
    has_reference: samples have the reference model's log-probs of both answers, under `REFERENCE_KEYS`.
    """

    unit, what, limit = "pair", "an answer with its prompt", "half of training.seq_len"
    has_reference = False

    def __init__(self, encoder: ChatEncoder, seq_len: int, too_long: str) -> None:
        super().__init__(encoder, seq_len // 2, too_long)
        self.key = f"pairs {self.key}"

    def _read(self, sample: Mapping[str, Any]) -> tuple[Tokens, int]:
        sample = renamed(sample, self.encoder.keys)
        is_object = isinstance(sample, Mapping)
        if not is_object or not all(
            isinstance(sample.get(x), str | list) for x in ("chosen", "rejected")
        ):
            got = f"the keys {sorted(sample)}" if is_object else type(sample).__name__
            raise ValueError(
                f"need an object with 'chosen' and 'rejected', strings or lists of messages, got {got}; convert "
                "the data, or name yours in training.chat_keys"
            )
        prompt, *answers = _prompt_and_answers(sample)
        shared = {key: sample.get(key) for key in ("tools", "chat_template_kwargs")}
        shared["prompt"] = prompt
        encoded = [self.encoder.encode(shared | {"completion": answer}) for answer in answers]
        num_tokens = sum(len(ids) for ids, _ in encoded)
        parts = [self._fitted(*part) for part in encoded]
        # The first token of a part is never a label.
        if not all(part.trained is not None and part.trained[1:].any() for part in parts):
            return Tokens(np.empty(0, np.int32), np.empty(0, bool)), num_tokens
        reference = None
        if self.has_reference:
            reference = sample.get(REFERENCE_KEYS[0]), sample.get(REFERENCE_KEYS[1])
            if not all(isinstance(x, int | float) and math.isfinite(x) for x in reference):
                raise ValueError(
                    f"loss.reference = 'precomputed' needs the numbers {' and '.join(REFERENCE_KEYS)}, sums "
                    f"of an answer's log-probs, got {reference}; add them, or choose another reference"
                )
        pair = join(parts)._replace(split=len(parts[0].ids), reference=reference)
        return pair, num_tokens


def _prompt_and_answers(sample: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    prompt, chosen, rejected = (sample.get(key) for key in ("prompt", "chosen", "rejected"))
    if isinstance(prompt, list):  # a list of messages
        answers = (
            [{"role": "assistant", "content": x}] if isinstance(x, str) else x
            for x in (chosen, rejected)
        )
        # Answers that are whole chats repeat the prompt.
        chosen, rejected = (x[len(prompt) :] if x[: len(prompt)] == prompt else x for x in answers)
        return prompt, chosen, rejected
    if all(isinstance(x, str) for x in (prompt, chosen, rejected)):
        return prompt, chosen, rejected
    shortest = min(len(chosen), len(rejected))
    n = next((i for i in range(shortest) if chosen[i] != rejected[i]), shortest)
    if isinstance(chosen, str) or isinstance(rejected, str) or not 0 < n < shortest:
        raise ValueError(
            f"a pair needs a 'prompt', or answers that are chats with a common beginning, got the prompt "
            f"{prompt!r:.80} and answers of the types {type(chosen).__name__} and {type(rejected).__name__} "
            f"that begin with {n} equal entries; correct it"
        )
    return chosen[:n], chosen[n:], rejected[n:]
