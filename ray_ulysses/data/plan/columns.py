"""Tables of numpy columns, one array per field: millions of entries without a Python object for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray


class Columns:
    """Base of the frozen dataclasses whose fields are arrays of equal length.

    Attributes:
        MEMORY: Structured type that names the fields and their types in memory.
        STORED: The same fields with their types on disk.
    """

    __slots__ = ()
    MEMORY: ClassVar[np.dtype[Any]]
    STORED: ClassVar[np.dtype[Any]]

    @classmethod
    def make(cls, columns: Sequence[NDArray[Any]]) -> Self:
        """Return the table of these columns, converted to their types in memory where they differ."""
        table: Any = cls
        names = cls.MEMORY.names or ()
        return table(  # type: ignore[no-any-return]
            **{name: column.astype(cls.MEMORY[name], copy=False) for name, column in zip(names, columns, strict=True)}
        )

    @classmethod
    def empty(cls, size: int = 0) -> Self:
        """Return a table of ``size`` entries whose values are not set."""
        return cls.make([np.empty(size, dtype=cls.MEMORY[name]) for name in cls.MEMORY.names or ()])

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Return the entries of all parts, one part after another."""
        filled = [part for part in parts if part.size]
        if len(filled) <= 1:
            return filled[0] if filled else cls.empty()
        return cls.make([np.concatenate(column) for column in zip(*(part.columns for part in filled), strict=True)])

    @property
    def columns(self) -> tuple[NDArray[Any], ...]:
        """Return the arrays in the order of the fields."""
        return tuple(getattr(self, name) for name in self.MEMORY.names or ())

    @property
    def size(self) -> int:
        """Return the number of entries."""
        return int(self.columns[0].size)

    def take(self, places: NDArray[Any] | slice) -> Self:
        """Return the entries at the places, or where a mask is true; a slice is a view."""
        return self.make([column[places] for column in self.columns])

    def stored(self) -> tuple[NDArray[Any], ...]:
        """Return the columns with their types on disk."""
        names = self.STORED.names or ()
        return tuple(
            column.astype(self.STORED[name], copy=False) for name, column in zip(names, self.columns, strict=True)
        )
