"""Logits on disk: parquet files that stream, split and say of which teacher and vocabulary they are.

    reader = LogitsReader(Path("results/logits/teacher/data"))
    reader.check_student(tokenizer)          # refuses another vocabulary
    for row in reader: …                     # numpy arrays of one text (or window of one)

- One row is one text, or a window of one. Position p of a row speaks of token `first + p`, given the tokens before it:
  the targets are shifted here, once, and no reader shifts again.
- Log-probabilities are natural logarithms at temperature 1 over the tokenizer's vocabulary: what a padded head has
  beyond it is left out before the softmax. What the stored ones lack to 1 is `tail_logprob`.
- Lists stand flattened, position after position, the most likely first. Their bytes are stored split (high bytes
  together, low bytes together) under zstd, which for 16-bit values in falling order saves the most; pages have
  checksums, and a file is damaged or whole, never a little wrong.
- The full distribution has no ids: value v of a position is that of token v.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gristmill.errors import UserError
from gristmill.logits.vocabulary import check_student
from gristmill.types import JsonDict

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT_VERSION = 1
#: Where the files' own metadata stands in the schema's.
METADATA_KEY = b"gristmill.logits"
#: Vocabularies up to this have ids of 16 bits.
UINT16_VOCABULARY = 65_536
SHIFT = "position p of a row is the distribution of token_ids[first + p], given token_ids[: first + p]"
#: Bytes a position takes as plain int32 ids and float16 log-probabilities of 64 tokens.
PLAIN_BYTES_64 = 384
#: What DistillKit's compressed format takes: k → bytes a position.
DISTILLKIT_BYTES = {50: 121, 128: 328}
ZSTD_LEVEL = 3
#: Decoded row groups that a reader keeps.
KEPT_GROUPS = 4
#: Values of lists in one row group: what a reader decodes at once.
GROUP_VALUES = 1_000_000

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class LogitsRow:
    """The logits of one text, or of a window of one: T tokens, P = T - first positions, k ids each."""

    key: str
    id: str
    sample: int
    #: 0 unless the text was split; windows of a text follow each other without a shared position.
    window: int
    #: Index of the first token that has a position.
    first: int
    token_ids: Ints  # (T,)
    top_ids: Ints  # (P, k), the most likely first; of a full distribution 0 … V - 1
    top_logprobs: Floats  # (P, k), as float16 has them
    tail_logprob: Floats  # (P,), log of what all other tokens have; -inf: nothing
    target_logprob: Floats  # (P,), of token_ids[first:]
    #: Tokens of the text that are in no row, because it was cut.
    cut_tokens: int = 0
    #: The most that ids beyond the tokenizer's vocabulary had at any position, before they were left out.
    padded_mass: float = 0.0
    #: The turn, where the rows of a run have turns; else empty.
    variant: str = ""

    @property
    def positions(self) -> int:
        """How many positions the row has."""
        return len(self.target_logprob)


class DamagedLogits(UserError):
    """A file of logits that was cut or changed."""


def id_type(vocab_size: int) -> str:
    """The type of the stored token ids: uint16 where it holds the vocabulary, else int32."""
    return "uint16" if vocab_size <= UINT16_VOCABULARY else "int32"


def schema(metadata: Mapping[str, Any]) -> pa.Schema:
    """The columns of a file, with its metadata."""
    import pyarrow as pa

    ids = pa.type_for_alias(id_type(metadata["vocab_size"]))

    def many(kind: pa.DataType) -> pa.DataType:
        return pa.list_(pa.field("element", kind, nullable=False))

    columns = {
        "key": pa.string(),
        "id": pa.string(),
        "sample": pa.int32(),
        "variant": pa.string(),
        "window": pa.int32(),
        "first": pa.int32(),
        "cut_tokens": pa.int32(),
        "padded_mass": pa.float32(),
        "token_ids": many(ids),
        "top_ids": many(ids),
        "top_logprobs": many(pa.float16()),
        "tail_logprob": many(pa.float16()),
        "target_logprob": many(pa.float32()),
    }
    if metadata["full"]:
        del columns["top_ids"]
    fields = [pa.field(name, kind, nullable=False) for name, kind in columns.items()]
    return pa.schema(fields, metadata={METADATA_KEY: json.dumps(metadata, sort_keys=True)})


class LogitsWriter:
    """Writes rows into one open file, a row group at a time; leaving the `with` block writes the file's end."""

    def __init__(self, handle: IO[bytes], metadata: Mapping[str, Any], group_values: int | None = None) -> None:
        """Begin the file, with row groups of so many values (None: GROUP_VALUES)."""
        import pyarrow.parquet as pq

        self._schema = schema(metadata)
        self._group_values = group_values or GROUP_VALUES
        lists = [field.name for field in self._schema if _is_list(field)]
        self._writer = pq.ParquetWriter(
            handle,
            self._schema,
            compression="zstd",
            compression_level=ZSTD_LEVEL,
            use_dictionary=False,
            write_statistics=False,
            write_page_checksum=True,
            column_encoding={f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in lists},
        )

    def __enter__(self) -> LogitsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        """Close; after an error too, for an open writer would write into a closed file when it is collected."""
        self.close()

    def write(self, rows: Sequence[LogitsRow]) -> None:
        """Write rows, as row groups of a row or more; one with as many values as a group is full."""
        group: list[LogitsRow] = []
        values = 0
        for row in rows:
            group.append(row)
            values += row.top_logprobs.size
            if values >= self._group_values:
                self._write(group)
                group, values = [], 0
        if group:
            self._write(group)

    def close(self) -> None:
        """Write the file's end, without which it is no parquet file."""
        self._writer.close()

    def _write(self, rows: Sequence[LogitsRow]) -> None:
        import pyarrow as pa

        columns = [_column(field, rows) for field in self._schema]
        self._writer.write_table(pa.Table.from_arrays(columns, schema=self._schema))


def read_metadata(path: Path) -> JsonDict:
    """The metadata of one file.

    Raises:
        DamagedLogits: it is no whole file of logits.
    """
    with _open(path) as file:
        return _metadata(path, file)


def file_rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[JsonDict]:
    """The short columns of every row (all but the lists), for who only wants to know what is there.

    Raises:
        DamagedLogits: the file is not whole.
    """
    with _open(path) as file:
        _metadata(path, file)
        wanted = list(columns or [field.name for field in file.schema_arrow if not _is_list(field)])
        for group in range(file.num_row_groups):
            for number, row in enumerate(_read(path, file, group, wanted).to_pylist()):
                yield {**row, "_group": group, "_row": number}


class LogitsFile:
    """One file, read by row group and row."""

    def __init__(self, path: Path) -> None:
        """Open it.

        Raises:
            DamagedLogits: it is not whole.
        """
        self.path = path
        self._file = _open(path)
        self.metadata = _metadata(path, self._file)
        self.group_rows = [self._file.metadata.row_group(n).num_rows for n in range(self._file.num_row_groups)]
        self._groups: OrderedDict[int, list[LogitsRow]] = OrderedDict()

    def row(self, group: int, number: int) -> LogitsRow:
        """One row; the row groups that were read last are kept."""
        if group not in self._groups:
            self._groups[group] = self._decoded(group)
            while len(self._groups) > KEPT_GROUPS:
                self._groups.popitem(last=False)
        self._groups.move_to_end(group)
        return self._groups[group][number]

    def close(self) -> None:
        """Close the file."""
        self._groups.clear()
        self._file.close()

    def _decoded(self, group: int) -> list[LogitsRow]:
        table = _read(self.path, self._file, group).combine_chunks()
        columns = {name: _values(table.column(name)) for name in table.column_names}
        return [self._row(columns, number) for number in range(table.num_rows)]

    def _row(self, columns: Mapping[str, Any], number: int) -> LogitsRow:
        found = {name: values[number] for name, values in columns.items()}
        positions = len(found["target_logprob"])
        logprobs = found.pop("top_logprobs").astype(np.float32).reshape(positions, self.metadata["k"])
        if self.metadata["full"]:
            ids = np.broadcast_to(np.arange(self.metadata["k"], dtype=np.int32), logprobs.shape)
        else:
            ids = found.pop("top_ids").astype(np.int32).reshape(logprobs.shape)
        return LogitsRow(
            token_ids=found.pop("token_ids").astype(np.int32),
            top_ids=ids,
            top_logprobs=logprobs,
            tail_logprob=found.pop("tail_logprob").astype(np.float32),
            target_logprob=found.pop("target_logprob"),
            **found,
        )


class LogitsReader:
    """A folder of logits, in the dataset's order: `for row in reader`, `reader[7]`, `len(reader)`."""

    def __init__(self, folder: Path) -> None:
        """Look at the files' ends; rows are read when they are asked for.

        Raises:
            UserError: there is no file, one is damaged, or they are of different teachers.
        """
        paths = sorted(folder.glob("part-*.parquet"))
        if not paths:
            raise UserError(f"{folder} holds no part-*.parquet; name the data/ folder of results/logits/<name>")
        self._files = [LogitsFile(path) for path in paths]
        self.metadata: JsonDict = self._files[0].metadata
        for file in self._files:
            if file.metadata != self.metadata:
                raise UserError(f"{file.path} has other metadata than {paths[0]}; make them again by one run")
        self._places = [
            (file, group, number)
            for file in self._files
            for group, count in enumerate(file.group_rows)
            for number in range(count)
        ]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> LogitsRow:
        file, group, number = self._places[index]
        return file.row(group, number)

    def __iter__(self) -> Iterator[LogitsRow]:
        return (self[index] for index in range(len(self)))

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()

    def check_student(self, tokenizer: Any, head_width: int | None = None) -> None:
        """Refuse a student that reads ids otherwise than the teacher did (vocabulary.check_student)."""
        check_student(self.metadata, tokenizer, head_width)


def _is_list(field: pa.Field) -> bool:
    from pyarrow import types

    return bool(types.is_list(field.type))


def _column(field: pa.Field, rows: Sequence[LogitsRow]) -> pa.Array:
    """One column of a row group."""
    import pyarrow as pa

    values = [getattr(row, field.name) for row in rows]
    if not _is_list(field):
        return pa.array(values, field.type)
    flat = [np.ravel(value).astype(field.type.value_type.to_pandas_dtype()) for value in values]
    offsets = np.cumsum([0, *map(len, flat)]).astype(np.int32)
    inner = pa.array(np.concatenate(flat), field.type.value_type)
    return pa.ListArray.from_arrays(offsets, inner, type=field.type)


def _values(column: pa.ChunkedArray) -> list[Any]:
    """A column's values: Python's own, or an array of each list."""
    if not _is_list(column):
        return list(column.to_pylist())
    return [
        values
        for chunk in column.chunks
        for values in np.split(chunk.flatten().to_numpy(), (chunk.offsets.to_numpy() - chunk.offsets[0].as_py())[1:-1])
    ]


def _open(path: Path) -> Any:
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path, page_checksum_verification=True, pre_buffer=False)
    except FileNotFoundError:
        raise
    except Exception as error:  # Arrow's and the operating system's, by what is broken
        raise _damaged(path, error) from error


def _metadata(path: Path, file: Any) -> JsonDict:
    text = (file.schema_arrow.metadata or {}).get(METADATA_KEY)
    if text is None:
        raise DamagedLogits(f"{path} is no file of logits (its schema has no {METADATA_KEY.decode()}); remove it")
    found: JsonDict = json.loads(text)
    if found.get("format_version") != FORMAT_VERSION:
        raise DamagedLogits(
            f"{path} has format_version {found.get('format_version')}, and this reads {FORMAT_VERSION}; make it again"
        )
    return found


def _read(path: Path, file: Any, group: int, columns: Sequence[str] | None = None) -> Any:
    try:
        return file.read_row_group(group, columns=columns, use_threads=False)
    except Exception as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> DamagedLogits:
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return DamagedLogits(f"{path} is damaged ({said[:160]}); remove it and run again: what it held is scored again")
