import json
import random

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from jaxmoe.config.errors import UserError
from jaxmoe.config.schema import Source
from jaxmoe.data import tokenizer as module
from jaxmoe.data.sources import Documents
from jaxmoe.data.tokenizer import END_OF_TEXT, ByteTokenizer, SubwordTokenizer, open_tokenizer, train_bpe

TEXTS = [
    "Fellow-Citizens of the Senate,\n\nI embrace with great satisfaction the opportunity.",
    "na\u00efve \u201cquotes\u201d \u2014 \u65e5\u672c\u8a9e \U0001f600\U0001f1e9\U0001f1ea e\u0301",
    "tabs\t\tand  spaces   \n \n\n  it's we'll 12345\r\n\x00\x1c\x85\u3000end ",
    f"a document that says {END_OF_TEXT} in the middle",
    " ",
    "x",
]


@pytest.fixture(scope="module")
def definition():
    return train_bpe(
        ["Fellow-Citizens of the Senate and House of Representatives: it's 12 o'clock.\n" * 3, *TEXTS], 400
    )


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request, definition):
    if request.param == "bytes":
        return ByteTokenizer()
    return SubwordTokenizer(definition, eos_token=END_OF_TEXT, place="here", cut_long_texts=True)


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_and_its_bytes_are_counted(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())
    assert tokenizer.eos_id not in ids, "no text ends a document"
    assert ids.dtype == np.uint32
    assert ids.max() < tokenizer.vocab_size
    assert tokenizer.token_bytes.shape == (tokenizer.vocab_size,)


def test_a_batch_is_encoded_like_each_text(tokenizer):
    for ids, text in zip(tokenizer.encode_batch(TEXTS), TEXTS, strict=True):
        np.testing.assert_array_equal(ids, tokenizer.encode(text))


def test_the_end_has_no_bytes_and_ids_without_text_decode_to_nothing(tokenizer):
    assert tokenizer.token_bytes[tokenizer.eos_id] == 0
    ids = [tokenizer.eos_id, *tokenizer.encode("ab"), tokenizer.eos_id, tokenizer.vocab_size + 5]
    assert tokenizer.decode(ids) == "ab"


def test_half_a_character_decodes_to_a_replacement(tokenizer):
    ids = tokenizer.encode("\U0001f600")
    assert "\ufffd" in tokenizer.decode(ids[:1]) or len(ids) == 1


def test_a_token_that_is_part_of_a_character_has_its_raw_bytes():
    bpe = SubwordTokenizer(train_bpe(["a"], 257), eos_token=END_OF_TEXT, place="here", cut_long_texts=True)
    assert bpe.vocab_size == 257
    assert sorted(bpe.token_bytes) == [0] + [1] * 256


def test_cutting_long_texts_changes_no_token(definition, monkeypatch):
    """Random texts over whatever GPT-2's pattern treats specially, cut at every place that may be cut."""
    whole = SubwordTokenizer(definition, eos_token=END_OF_TEXT, place="here", cut_long_texts=False)
    cut = SubwordTokenizer(definition, eos_token=END_OF_TEXT, place="here", cut_long_texts=True)
    monkeypatch.setattr(module, "_PIECE_CHARACTERS", 1)
    source = random.Random(0)
    alphabet = [
        *"  \n\n\t\r's'llabAB12.,!-\x1c\x85",
        "\u00a0",
        "\u3000",
        "\u00e9",
        "\u65e5",
        "\U0001f600",
        "the ",
        "it's ",
    ]
    texts = ["".join(source.choices(alphabet, k=60)) for _ in range(400)]
    assert sum(len(list(module.cut_text(text))) for text in texts) > 1500
    assert all("".join(module.cut_text(text)) == text for text in texts)
    for text, ids in zip(texts, cut.encode_batch(texts), strict=True):
        np.testing.assert_array_equal(ids, whole.encode(text), repr(text))


def test_training_gives_the_same_bpe_again_and_another_for_other_text(definition):
    texts = ["Fellow-Citizens of the Senate and House of Representatives: it's 12 o'clock.\n" * 3, *TEXTS]
    assert train_bpe(texts, 400) == definition
    assert train_bpe([*texts, "zebra zebra"], 400) != definition


def documents(folder):
    return Documents(Source(kind="txt", path=str(folder / "train")), "data.train")


def test_the_bpe_is_trained_once(make_config, speeches, caplog):
    caplog.set_level("INFO")
    config = make_config(tokenizer={"kind": "bpe"})
    first = open_tokenizer(config, documents(speeches))
    second = open_tokenizer(config, documents(speeches))
    assert first.vocab_size == 512
    assert first.fingerprint == second.fingerprint
    assert caplog.text.count("training a byte-level BPE of 512 tokens") == 1


def test_a_text_too_short_for_the_vocabulary_is_said(make_config, tmp_path, caplog):
    caplog.set_level("INFO")
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.txt").write_text("a short text")
    tokenizer = open_tokenizer(make_config(tokenizer={"kind": "bpe"}), documents(tmp_path))
    assert 257 <= tokenizer.vocab_size < 512
    assert "too short for 512 tokens" in caplog.text


@pytest.mark.parametrize(
    ("vocab_size", "settings", "expected"),
    [
        (256, {"kind": "bytes"}, ["model.vocab_size=256 must be at least 257", "set model.vocab_size to 320"]),
        (512, {"kind": "bpe", "vocab_size": 513}, ["model.vocab_size=512 must be at least 513"]),
        (512, {"kind": "bpe", "vocab_size": 256}, ["data.tokenizer.vocab_size=256", "at least 257"]),
        (200, {"kind": "bpe"}, ["vocab_size=200", "at least 257"]),
        (512, {"kind": "file"}, ["data.tokenizer.path is missing"]),
        (512, {"kind": "file", "path": "none.json"}, ["data.tokenizer.path=none.json", "cannot be read"]),
        (512, {"kind": "file", "path": "broken.json"}, ["broken.json: no tokenizer.json"]),
        (512, {"kind": "file", "path": "config.json"}, ["config.json: no tokenizer.json"]),
        (512, {"kind": "file", "path": "latin.json"}, ["latin.json: not UTF-8"]),
        (399, {"kind": "file", "path": "bpe.json"}, ["model.vocab_size=399 must be at least 400"]),
        (512, {"kind": "file", "path": "bpe.json", "eos_token": "<end>"}, ['has no token "<end>"', "eos_token"]),
        (512, {"kind": "file", "path": "words.json", "eos_token": "b"}, ["neither a byte-level tokenizer nor"]),
        (512, {"kind": "file", "path": "words.json"}, ["no token known to end a document", "special tokens: none"]),
    ],
)  # fmt: skip
def test_a_bad_tokenizer_is_a_message(
    make_config, speeches, tmp_path, monkeypatch, definition, vocab_size, settings, expected
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "latin.json").write_bytes(b"\xe9")
    (tmp_path / "bpe.json").write_text(definition)
    (tmp_path / "words.json").write_text(tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a")).to_str())
    with pytest.raises(UserError) as caught:
        open_tokenizer(make_config(vocab_size=vocab_size, tokenizer=settings), documents(speeches))
    for part in expected:
        assert part in str(caught.value)


def from_file(make_config, speeches, path, **settings):
    config = make_config(tokenizer={"kind": "file", "path": str(path), **settings})
    return open_tokenizer(config, documents(speeches))


def test_a_tokenizer_file_encodes_like_the_one_that_was_saved(make_config, speeches, tmp_path, definition):
    (tmp_path / "tokenizer.json").write_text(definition)
    loaded = from_file(make_config, speeches, tmp_path / "tokenizer.json")
    trained = SubwordTokenizer(definition, eos_token=END_OF_TEXT, place="here", cut_long_texts=True)
    for text in TEXTS:
        np.testing.assert_array_equal(loaded.encode(text), trained.encode(text))
    np.testing.assert_array_equal(loaded.token_bytes, trained.token_bytes)


def test_the_end_of_a_document_comes_from_the_setting_or_the_file_beside(make_config, speeches, tmp_path, definition):
    parsed = json.loads(definition)
    extra = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    parsed["added_tokens"] += [{"id": 400, "content": "<end>", **extra}, {"id": 401, "content": "</s>", **extra}]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(parsed))
    with pytest.raises(UserError, match=r"several tokens known.*<\|endoftext\|>, <end>, </s>"):
        from_file(make_config, speeches, path)
    assert from_file(make_config, speeches, path, eos_token="<end>").eos_id == 400
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}}')
    assert from_file(make_config, speeches, path).eos_id == 401
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    assert from_file(make_config, speeches, path).eos_id == 400
    assert from_file(make_config, speeches, path, eos_token="</s>").eos_id == 401
    assert from_file(make_config, speeches, path).token_bytes[[0, 400, 401]].tolist() == [0, 0, 0]


def test_bytes_of_a_tokenizer_with_byte_fallback_are_counted(make_config, speeches, tmp_path):
    """As SentencePiece models are converted: U+2581 stands for a space, unknown characters are written in bytes."""
    words = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581a"]
    model = models.BPE({word: i for i, word in enumerate(words)}, [("\u2581", "a")], byte_fallback=True, unk_token=None)
    inner = tokenizers.Tokenizer(model)
    inner.normalizer = normalizers.Replace(" ", "\u2581")
    inner.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    inner.add_special_tokens(["</s>"])
    (tmp_path / "tokenizer.json").write_text(inner.to_str())
    loaded = from_file(make_config, speeches, tmp_path / "tokenizer.json")
    text = "ab a \u00e9 \U0001f600b"
    ids = loaded.encode(text)
    assert loaded.decode(ids) == text
    assert loaded.token_bytes[ids].sum() == len(text.encode())
    assert loaded.token_bytes[loaded.eos_id] == 0


def test_an_added_token_that_is_ordinary_text_has_its_bytes(make_config, speeches, tmp_path, definition):
    inner = tokenizers.Tokenizer.from_str(definition)
    inner.add_tokens(["\u65e5 \u672c"])
    assert inner.pre_tokenizer.__class__ is pre_tokenizers.ByteLevel
    (tmp_path / "tokenizer.json").write_text(inner.to_str())
    loaded = from_file(make_config, speeches, tmp_path / "tokenizer.json")
    text = "x\u65e5 \u672cx"
    assert 400 in loaded.encode(text)
    assert loaded.token_bytes[loaded.encode(text)].sum() == len(text.encode())


def test_an_ordinary_token_that_is_made_the_end_has_no_bytes(make_config, speeches, tmp_path, definition):
    (tmp_path / "tokenizer.json").write_text(definition)
    loaded = from_file(make_config, speeches, tmp_path / "tokenizer.json", eos_token="Z")
    assert loaded.eos_id != 0
    assert loaded.token_bytes[loaded.eos_id] == 0
