"""One rank's rows of every global batch, read from row streams (see `row_streams`)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from torchtitan.data.chats import ChatTokens
from torchtitan.data.document_sources import BEGIN_AGAIN, Source, deal_again
from torchtitan.data.row_plan import Plan, PlannedStream, count_tokens
from torchtitan.data.row_streams import Packing, Row, RowStream
from torchtitan.tools.errors import ConfigError
from torchtitan.tools.logging import logger


class PackedDataset(IterableDataset):
    """The rows of one data-parallel rank, in the order of the global batch.

    Yields `(input_dict, labels)` of LongTensors [T]; `input_dict` has "input", the entries that
    `packing` adds, and "sample_ids" [2], the indices of the first and the last document in the row, or
    -1 if unknown. A data worker yields None for the rows that other workers of this rank read.

    rows: number of rows of this rank per step; None: one row stream for this rank. Each row has its own row
        stream. With a streamed source, the number of row streams of all ranks is the greatest common divisor
        of the number of rows in the global batch and the number of files of the source.
    infinite: repeat the data without end. Otherwise each iteration reads the data from the start.
    planned: plan all rows of the run in advance, from `limit` epochs of each source. Collective.
    Raises ValueError if the data hold no documents, or if finite data do not fill one row. Raises
    ConfigError if the row streams cannot be divided among the ranks.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        packing: Packing,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        infinite: bool = False,
        rows: int | None = None,
        planned: bool = False,
    ) -> None:
        self._packing, self._infinite = packing, infinite
        self.sources = [
            replace(s, number=i, limit=1 if s.limit is None and not infinite else s.limit)
            for i, s in enumerate(sources)
        ]
        self._rows = rows or 1
        num_rows = self._rows * dp_world_size  # rows of the global batch
        shards = [s.data.num_shards for s in self.sources if not s.is_indexed]
        self._num_streams = n = math.gcd(num_rows, *shards) if rows else dp_world_size
        self._rows_per_stream = num_rows // n
        if n % dp_world_size:
            fitting = " or ".join(str(i) for i in range(1, n + 1) if not n % i)
            raise ConfigError(
                f"{dp_world_size} data-parallel ranks cannot share the streamed files: their number, "
                f"{' and '.join(map(str, shards))}, and the global batch of {num_rows} rows have the greatest "
                f"common divisor {n}; train on {fitting} ranks, or copy the data to this machine"
            )
        per_rank = n // dp_world_size
        self._numbers = range(dp_rank * per_rank, (dp_rank + 1) * per_rank)  # this rank's streams
        self._first_row = dp_rank * self._rows
        self._plan = Plan(self.sources, packing) if planned else None
        # Row stream number -> row stream that this process reads.
        self._streams: dict[int, RowStream | PlannedStream] = {}
        self._row = 0  # index of the next row among this rank's rows of a step
        self._saved: dict[int, Any] = {}  # loaded states of streams that are not created yet
        self.is_resumed = self._ran_out = False

    @property
    def num_documents(self) -> int | None:
        is_indexed = all(source.is_indexed for source in self.sources)
        return sum(len(source.data) for source in self.sources) if is_indexed else None

    @property
    def source_names(self) -> list[str]:
        """The names of the sources; equal names get their index as a suffix."""
        names = [source.name for source in self.sources]
        return [n if names.count(n) == 1 else f"{n}_{i}" for i, n in enumerate(names)]

    @property
    def num_planned_rows(self) -> int:
        return self._plan.num_rows if self._plan is not None else 0

    @property
    def num_steps_left(self) -> int:
        """The number of steps from the loaded position to the end of the plan."""
        first = self._numbers[0]
        stream = self._streams.get(first) or self._stream(first)
        assert isinstance(stream, PlannedStream)
        return stream.num_steps_left()

    @property
    def has_chats(self) -> bool:
        return any(isinstance(source.encode, ChatTokens) for source in self.sources)

    def log_chats(self) -> None:
        """Log each chat source's share of trained tokens, and drop chats without tokens. Collective.

        Call it before iterating or loading a position.
        """
        for name, source in zip(self.source_names, self.sources, strict=True):
            encode = source.encode
            if not isinstance(encode, ChatTokens) or not source.is_indexed:
                continue
            tokens, trained, whole = count_tokens(source).T
            num_left_out = (tokens == 0).sum()
            num_cut = ((tokens < whole) & (tokens > 0)).sum()
            logger.info(
                f"dataset {name}: {len(tokens):,} {encode.unit}s of {tokens.sum():,} tokens, "
                f"{trained.sum() / max(tokens.sum(), 1):.1%} of them trained; {num_cut:,} {encode.unit}s "
                f"longer than {encode.limit} = {encode.seq_len} are cut, {num_left_out:,} left out"
            )
            if num_left_out == len(tokens):
                raise ValueError(
                    f"dataset {name}: every {encode.unit} is left out, because it is longer than "
                    f"{encode.limit} = {encode.seq_len} or trains no token within it; raise seq_len"
                )
            if num_left_out and self._plan is None:  # a plan leaves out empty documents anyway
                source.leave_out(tokens == 0)

    def __iter__(self) -> Iterator[Row | None]:
        if self._ran_out:
            self._streams, self._row, self.is_resumed, self._ran_out = {}, 0, False, False
        self._start()
        has_row = self.is_resumed
        ended: set[int] = set()
        while len(ended) < len(self._streams):
            number = (self._first_row + self._row) // self._rows_per_stream
            self._row = (self._row + 1) % self._rows
            row = None
            if number in self._streams and number not in ended:
                row = self._streams[number].next_row()
                if row is None:
                    ended.add(number)
            has_row |= row is not None
            if row is not None or get_worker_info() is not None:
                yield row
        if self._streams and not has_row:
            raise ValueError(
                f"dataset {self.sources[0].name!r} is too small: reader {min(self._streams) + 1} of "
                f"{self._num_streams} got fewer tokens than one row takes, seq_len + 1 = "
                f"{self._packing.seq_len + 1}; use more data, a smaller seq_len, or fewer ranks"
            )
        if self._infinite and self._plan is None:  # finite data are expected to end
            logger.warning(f"Dataset {' and '.join(self.source_names)} has run out of data")
        self._ran_out = True
        while get_worker_info() is not None:  # another worker may have rows left
            yield None

    def _start(self) -> None:
        if not self._streams:  # not in `__init__`, where the data worker's id is unknown
            worker = get_worker_info()
            worker_id, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
            numbers = self._numbers[worker_id::num_workers]
            self._streams = {number: self._stream(number) for number in numbers}
            self._saved = {}

    def _stream(self, number: int) -> RowStream | PlannedStream:
        stream: RowStream | PlannedStream
        if self._plan is not None:
            stream = PlannedStream(self._plan, self._packing, number, self._num_streams)
        else:
            stream = RowStream(self.sources, self._packing, number, self._num_streams)
        if self._saved:
            stream.load(self._saved[number])
        return stream

    # ---- the position; in checkpoints row streams are called lanes ----

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the row streams that this process reads, as plain data."""
        self._start()
        return {
            "num_lanes": self._num_streams,
            "row": self._row,
            "sources": [source.identity() for source in self.sources],
            "plan": None if self._plan is None else self._plan.identity(),
            "numbers": list(self._streams),
            "lanes": [stream.state() for stream in self._streams.values()],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume at the position of a dataset that read the same row streams."""
        self.inherit([state_dict])
        self._start()

    def inherit(self, states: list[dict[str, Any]]) -> None:
        """Resume where other datasets stopped; `states`, their `state_dict`s, together hold all row streams.

        With the same global batch size the rows equal those of an uninterrupted run. Otherwise the unread
        documents are divided among the new streams. Call it before iterating, in the dataloader's process.
        Raises ValueError if the position belongs to other data or another order.
        """
        for state in states:
            theirs, mine = (
                [(source["num_documents"], source["seed"]) for source in sources]
                for sources in (state["sources"], [source.identity() for source in self.sources])
            )
            if theirs != mine:
                raise ValueError(
                    f"the data position is for (number of documents, data_seed) = {theirs}, and this run has "
                    f"{mine} (data_seed is None without training.shuffle): resume with the saved values, "
                    f"or {BEGIN_AGAIN}"
                )
        saved: dict[int, Any] = {}
        for state in states:
            saved |= zip(state["numbers"], state["lanes"], strict=True)
        saved, num_saved = self._in_this_plan(states[0].get("plan"), saved, states[0]["num_lanes"])
        rows = {state["row"] for state in states}
        self._row = rows.pop() % self._rows if len(rows) == 1 else 0
        if num_saved != self._num_streams or not saved.keys() >= set(self._numbers):
            saved, self._row = self._dealt_again(saved, num_saved), 0
        self._saved = {number: saved[number] for number in self._numbers}
        self._streams, self.is_resumed, self._ran_out = {}, True, False

    def _in_this_plan(
        self, plan: Any, saved: dict[int, Any], num_saved: int
    ) -> tuple[dict[int, Any], int]:
        """Return (states of the row streams, number of row streams), converted to this run's plan if any."""
        own = self._plan and self._plan.identity()
        if (plan and plan[0]) != (own and own[0]) or any(
            a != b for a, b in zip(*(x[1] for x in (plan, own) if x), strict=False)
        ):
            raise ValueError(
                "the data position was saved with another training.epochs, training.packing or "
                f"training.seq_len, or other documents: resume with the saved ones, or {BEGIN_AGAIN}"
            )
        if not plan:
            return saved, num_saved
        end = sum(plan[1])
        places = {first + n * num_saved for _, [(first, n, _)], _ in saved.values()}
        if min(places) < end:
            if num_saved == self._num_streams:
                return saved, num_saved
            if len(places) > 1:
                raise ValueError(
                    "the data position is within a step: resume with the same training.global_batch_size, "
                    f"or {BEGIN_AGAIN}"
                )
        # If the global batch size changed, resume after the last completed step. If epochs were added, resume
        # after the last row of the saved plan.
        row = min(*places, end)  # the last step may be padded beyond `end`
        return dict.fromkeys(range(self._num_streams), ([], [(row, 0, [])], [])), self._num_streams

    def _dealt_again(self, saved: dict[int, Any], num_saved: int) -> dict[int, Any]:
        n = self._num_streams
        if len(saved) != num_saved:
            raise ValueError(
                f"the data position has {len(saved)} of {num_saved} row streams: the "
                f"checkpoint is damaged; {BEGIN_AGAIN}"
            )
        if not all(source.is_indexed for source in self.sources):
            raise ValueError(
                f"the data position is split over {num_saved} row streams, and this run has {n}. A dataset that "
                "is a stream needs the same number: resume on as many ranks with the same "
                f"training.global_batch_size, or {BEGIN_AGAIN}"
            )
        logger.info(f"Redistributed the data position of {num_saved} row streams over {n}")
        all_places, all_feeds, all_tokens, *_ = zip(
            *(saved[number] for number in range(num_saved)), strict=False
        )
        places = [place for open_places in all_places for place in open_places]
        by_source = [deal_again(states, n) for states in zip(*all_feeds, strict=True)]
        num_tokens = [sum(tokens) // n for tokens in zip(*all_tokens, strict=True)]
        return {
            i: (places[i::n], [states[i] for states in by_source], list(num_tokens))
            for i in range(n)
        }
