"""The tokens of one step: a run for each sequence, so that decode, prefill and verify are one trajectory.

Decode is one token for each sequence, and prefill any number. Verify is the accepted drafts of the step before, which are
only replayed, then the golden token, after which the pools are stored, then the drafts.
"""

from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """x: activations [N, L, D], padded to the longest run. For each run: its length, how many tokens at its start are
    replayed and have no output, and after how many the pools are stored. contexts: of a mixer, which are prefilled.
    """

    x: dict[str, Tensor]
    length: tuple[int, ...]
    replayed: tuple[int, ...]
    stored: tuple[int, ...]
    contexts: tuple[bool, ...] = field(default=(), kw_only=True)

    @classmethod
    def single(cls, x: dict[str, Tensor]) -> "Tokens":
        """One token for each sequence, x [N, D]."""
        count = len(next(iter(x.values())))
        return cls({name: value[:, None] for name, value in x.items()}, (1,) * count, (0,) * count, (1,) * count)

    def __getitem__(self, sequences: slice) -> "Tokens":
        x = {name: value[sequences] for name, value in self.x.items()}
        length, replayed, stored = (own[sequences] for own in (self.length, self.replayed, self.stored))
        return Tokens(x, length, replayed, stored, contexts=self.contexts[sequences])

    @property
    def longest(self) -> int:
        return self.any.shape[1]

    @property
    def any(self) -> Tensor:
        """One of the activations, for its sizes."""
        return next(iter(self.x.values()))

    @property
    def offsets(self) -> tuple[int, ...]:
        """The row of the output at which each sequence starts, and the count of rows."""
        return (0, *accumulate(length - replayed for length, replayed in zip(self.length, self.replayed, strict=True)))

    def rows(self, sequences: slice) -> slice:
        """The rows of the output that belong to a range of sequences."""
        start, stop, _ = sequences.indices(len(self.length))
        return slice(self.offsets[start], self.offsets[stop])

    def reversed_rows(self) -> Tensor:
        """The rows of the output, or of activations without replayed tokens, with the sequences in reverse order."""
        parts = [torch.arange(start, end) for start, end in pairwise(self.offsets)]
        return torch.cat([torch.arange(0), *reversed(parts)]).to(self.any.device)

    def place(self, row: int) -> tuple[int, int]:
        """The sequence and the token of a row of the output."""
        sequence = next(i for i, end in enumerate(self.offsets[1:]) if row < end)
        return sequence, row - self.offsets[sequence]

    def packed(self, padded: Tensor) -> Tensor:
        """Rows of the output [T, ...] out of [N, L, ...]."""
        places = [
            i * self.longest + t for i, (skip, end) in enumerate(zip(self.replayed, self.length, strict=True)) for t in range(skip, end)
        ]
        flat = padded.flatten(0, 1)
        return flat if len(places) == len(flat) else flat[torch.tensor(places, dtype=torch.long, device=flat.device)]

    def runs(self, token: int) -> Tensor | None:
        """Which sequences have a token so far in, bool [N]; None: all."""
        return self._beyond(self.length, token)

    def stores(self, token: int) -> Tensor | None:
        """Whose pools hold what this token leaves, or a later one, bool [N]; None: all."""
        return self._beyond(self.stored, token)

    def _beyond(self, counts: tuple[int, ...], token: int) -> Tensor | None:
        return None if not counts or min(counts) > token else torch.tensor([count > token for count in counts], device=self.any.device)
