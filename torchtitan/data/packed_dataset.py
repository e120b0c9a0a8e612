"""The rows of one rank's part of every global batch, from the lanes that this process reads."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from torchtitan.data.chats import ChatTokens
from torchtitan.data.counts import count_tokens
from torchtitan.data.document_sources import DocumentShare, Source, deal_again
from torchtitan.data.row_plan import Plan, PlannedStream
from torchtitan.data.row_streams import Packing, Row, RowStream
from torchtitan.tools.errors import ConfigError
from torchtitan.tools.logging import logger

_BEGIN_AGAIN = (
    "begin with this data from its start: checkpoint.exclude_from_loading = ['dataloader']"
)


class PackedDataset(IterableDataset):
    """The rows of one data-parallel rank, in the order of its part of the global batch.

    Yields `(input_dict, labels)` of LongTensors [T]; `input_dict` has "input", what `packing` adds, and
    "sample_ids" [2], the indices of the first and the last document in the row, -1 if unknown. In a
    data worker, rows that another worker of this rank reads are None.

    rows: of this rank in a step, each with a lane of its own. A stream has as many lanes as its number
        of files and the rows of the global batch have in common; each lane then fills several rows.
        None: the rank has one lane, whatever the size of its batches.
    infinite: begin again at the end of the data. Otherwise the rows end with the data, and another
        iteration begins from the start.
    planned: plan the rows for the sources' limits, so that every document is read that often; the rest of
        the last step is padding. Then making the dataset is collective, because the documents are counted.

    Raises ValueError if the data hold no documents or, when finite, no whole row; ConfigError if the
    ranks cannot share a stream.
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
            replace(
                source,
                number=number,
                limit=1 if source.limit is None and not infinite else source.limit,
            )
            for number, source in enumerate(sources)
        ]
        self._dp_rank, self._dp_world_size = dp_rank, dp_world_size
        self._rows = rows or 1
        num_rows = self._rows * dp_world_size  # of the global batch
        shards = [s.data.num_shards for s in self.sources if not s.is_indexed]
        self._num_lanes = math.gcd(num_rows, *shards) if rows else dp_world_size
        self._rows_per_lane = num_rows // self._num_lanes
        if self._num_lanes % dp_world_size:
            fitting = [n for n in range(1, self._num_lanes + 1) if not self._num_lanes % n]
            ranks = "1 rank" if fitting == [1] else f"{' or '.join(map(str, fitting))} ranks"
            raise ConfigError(
                f"{dp_world_size} data-parallel ranks cannot share the stream's files: the number of "
                f"files, {' and '.join(map(str, shards))}, and the global batch of {num_rows} rows have "
                f"the divisor {self._num_lanes} in common; train on {ranks}, or copy the data to this "
                "machine"
            )
        self._plan = Plan(self.sources, packing) if planned else None
        self._lanes: dict[
            int, RowStream | PlannedStream
        ] = {}  # those this process reads, by number
        self._row = 0  # the next row, of those of this rank in a step
        self._saved: dict[int, Any] = {}  # the states of this rank's lanes, until they are made
        self.is_resumed = self._ran_out = False

    @property
    def num_documents(self) -> int | None:
        """The number of documents of all readers; None if a source is a stream."""
        counts = [len(s.data) for s in self.sources if s.is_indexed]
        return sum(counts) if len(counts) == len(self.sources) else None

    @property
    def source_names(self) -> list[str]:
        """The names of the sources, with a number where several have the same name."""
        names = [source.name for source in self.sources]
        return [n if names.count(n) == 1 else f"{n}_{i}" for i, n in enumerate(names)]

    @property
    def num_planned_rows(self) -> int:
        return self._plan.num_rows if self._plan is not None else 0

    @property
    def num_steps_left(self) -> int:
        """The number of steps from the position that was loaded to the end of a plan."""
        first = self._lanes_of_rank()[0]
        lane = self._lanes.get(first) or self._lane(first)
        assert isinstance(lane, PlannedStream)
        return lane.num_steps_left()

    @property
    def has_chats(self) -> bool:
        return any(isinstance(source.encode, ChatTokens) for source in self.sources)

    def log_chats(self) -> None:
        """Log what is trained of each source of chats, and leave out the chats without tokens.

        Collective: the ranks count together. Call it before iterating or loading a position.
        """
        for name, source in zip(self.source_names, self.sources, strict=True):
            if not isinstance(source.encode, ChatTokens) or not source.is_indexed:
                continue
            tokens, trained, whole = count_tokens(source).T
            num_left_out = (tokens == 0).sum()
            num_cut = ((tokens < whole) & (tokens > 0)).sum()
            logger.info(
                f"dataset {name}: {len(tokens):,} chats of {tokens.sum():,} tokens, "
                f"{trained.sum() / max(tokens.sum(), 1):.1%} of them trained; {num_cut:,} chats longer "
                f"than training.seq_len = {self._packing.seq_len} are cut, {num_left_out:,} left out"
            )
            if num_left_out == len(tokens):
                raise ValueError(
                    f"dataset {name}: every chat is left out, because it is longer than "
                    f"training.seq_len = {self._packing.seq_len} (or trains nothing before that token); "
                    "raise training.seq_len"
                )
            if num_left_out and self._plan is None:  # a plan has no rows for them
                source.leave_out(tokens == 0)

    def __iter__(self) -> Iterator[Row | None]:
        if self._ran_out:
            self._lanes, self._row, self.is_resumed, self._ran_out = {}, 0, False, False
        self._start()
        has_row = self.is_resumed
        ended: set[int] = set()
        while len(ended) < len(self._lanes):
            number = (self._dp_rank * self._rows + self._row) // self._rows_per_lane
            self._row = (self._row + 1) % self._rows
            row = None
            if number in self._lanes and number not in ended:
                row = self._lanes[number].next_row()
                if row is None:
                    ended.add(number)
            has_row |= row is not None
            if row is not None or get_worker_info() is not None:
                yield row
        if self._lanes and not has_row:
            raise ValueError(self._too_small())
        if self._infinite and self._plan is None:  # otherwise the end is what was asked for
            logger.warning(f"Dataset {' and '.join(self.source_names)} has run out of data")
        self._ran_out = True
        while get_worker_info() is not None:  # another worker may have rows left
            yield None

    def _too_small(self) -> str:
        number, lane = next(iter(self._lanes.items()))
        needed = self._packing.seq_len + 1
        return (
            f"dataset {self.sources[0].name!r} is too small: reader {number + 1} of {self._num_lanes} "
            f"(one per rank) got {lane.num_left_over} tokens, and one row takes "
            f"seq_len + 1 = {needed}; use more data, a smaller seq_len, or fewer ranks"
        )

    def _start(self) -> None:
        """Make the lanes that this process reads, once: only a data worker knows its number."""
        if self._lanes:
            return
        worker = get_worker_info()
        worker_id, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        for number in self._lanes_of_rank()[worker_id::num_workers]:
            self._lanes[number] = self._lane(number)
        self._saved = {}

    def _lane(self, number: int) -> RowStream | PlannedStream:
        lane: RowStream | PlannedStream
        if self._plan is not None:
            lane = PlannedStream(self._plan, self._packing, number, self._num_lanes)
        else:
            lane = RowStream(self.sources, self._packing, number, self._num_lanes)
        if self._saved:
            lane.load(self._saved[number])
        return lane

    def _lanes_of_rank(self) -> range:
        per_rank = self._num_lanes // self._dp_world_size
        return range(self._dp_rank * per_rank, (self._dp_rank + 1) * per_rank)

    # ---- the position ----

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the lanes that this process reads, as plain data.

        It holds the numbers of documents that are partly read, or their unread text for a stream.
        """
        self._start()
        return {
            "num_lanes": self._num_lanes,
            "row": self._row,
            "sources": [source.identity() for source in self.sources],
            "plan": None if self._plan is None else self._plan.identity(),
            "numbers": list(self._lanes),
            "lanes": [lane.state() for lane in self._lanes.values()],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a dataset that read the same lanes stopped."""
        self.inherit([state_dict])
        self._start()

    def inherit(self, states: list[dict[str, Any]]) -> None:
        """Go on where other datasets stopped, on any number of ranks and data workers.

        states: the `state_dict` of each, which together have all lanes. If the global batch has as many
        rows as before, the rows are those of the unbroken run. Otherwise each document, or part of one,
        that the saved lanes had not read goes to one of the new lanes. Call it before iterating, in the
        dataloader's process. Raises ValueError for the position of other data, or of another order.
        """
        for state in states:
            self._check_sources(state["sources"])
        num_saved = states[0]["num_lanes"]
        lanes: dict[int, Any] = {}
        for state in states:
            lanes |= zip(state["numbers"], state["lanes"], strict=True)
        lanes, num_saved = self._in_this_plan(states[0].get("plan"), lanes, num_saved)
        rows = {state["row"] for state in states}
        self._row = rows.pop() % self._rows if len(rows) == 1 else 0
        if num_saved != self._num_lanes or not lanes.keys() >= set(self._lanes_of_rank()):
            lanes, self._row = self._dealt_again(lanes, num_saved), 0
        self._saved = {number: lanes[number] for number in self._lanes_of_rank()}
        self._lanes, self.is_resumed, self._ran_out = {}, True, False

    def _check_sources(self, saved: list[dict[str, Any]]) -> None:
        theirs, mine = (
            [(source["num_documents"], source["seed"]) for source in sources]
            for sources in (saved, [source.identity() for source in self.sources])
        )
        if theirs != mine:
            raise ValueError(
                f"the checkpoint's data position is for sources of (documents, data_seed) = {theirs}, and "
                f"this run's are {mine}, where None is training.shuffle = False: resume with the same, or "
                f"{_BEGIN_AGAIN}"
            )

    def _in_this_plan(
        self, saved: Any, lanes: dict[int, Any], num_saved: int
    ) -> tuple[dict[int, Any], int]:
        """Return the lanes' states in this run's plan, and the number of these lanes.

        A global batch of another size goes on behind the last step's rows, and more passes behind the
        last row.
        """
        own = self._plan and self._plan.identity()
        if (saved and saved[0]) != (own and own[0]) or any(
            a != b for a, b in zip(*(plan[1] for plan in (saved, own) if plan), strict=False)
        ):
            raise ValueError(
                "the checkpoint's data position is for rows of another training.epochs, packing or "
                f"seq_len, or of other documents: resume with the same, or {_BEGIN_AGAIN}"
            )
        if not saved:
            return lanes, num_saved
        end = sum(saved[1])
        is_over = all(base + n * num_saved >= end for _, [(base, n, _)], _ in lanes.values())
        if not is_over and num_saved == self._num_lanes:
            return lanes, num_saved
        places = {(base, n, len(left)) for _, [(base, n, left)], _ in lanes.values()}
        if not is_over and len(places) > 1:
            raise ValueError(
                "the data position is within a step: resume with the same training.global_batch_size, "
                f"or {_BEGIN_AGAIN}"
            )
        base, n, _ = next(iter(places))
        row = min(base + n * num_saved, end)  # the rest of a last step is padding
        return dict.fromkeys(range(self._num_lanes), ([], [(row, 0, [])], [])), self._num_lanes

    def _dealt_again(self, saved: dict[int, Any], num_saved: int) -> dict[int, Any]:
        """Divide what the saved lanes had left among this dataset's number of lanes."""
        if len(saved) != num_saved:
            raise ValueError(
                f"the data position has {len(saved)} of {num_saved} lanes (rows of the global batch): "
                f"the checkpoint is damaged; {_BEGIN_AGAIN}"
            )
        if not all(source.is_indexed for source in self.sources):
            raise ValueError(
                f"the data position of a stream in {num_saved} parts does not divide among "
                f"{self._num_lanes}: resume on as many ranks with the same training.global_batch_size, "
                f"or {_BEGIN_AGAIN}"
            )
        lanes = [saved[number] for number in range(num_saved)]
        n = self._num_lanes
        logger.info(f"Dealt the data position of {len(lanes)} rows out to {n}")
        places = [place for open_places, *_ in lanes for place in open_places]
        feeds: list[list[Any]] = [[] for _ in range(n)]
        for source in range(len(lanes[0][1])):
            shares = [
                DocumentShare(number, len(lanes)).resumed(states[source])
                for number, (_, states, *_) in enumerate(lanes)
            ]
            for number, share in enumerate(deal_again(shares, n)):
                feeds[number].append(share.state())
        num_tokens = [sum(tokens) // n for tokens in zip(*(lane[2] for lane in lanes), strict=True)]
        return {i: (places[i::n], feeds[i], list(num_tokens)) for i in range(n)}
