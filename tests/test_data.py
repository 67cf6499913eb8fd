"""Where samples come from, and what is said when they cannot."""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from memcalc.data import Samples, check, load, split
from memcalc.errors import FileError, InputError, MemcalcError
from memcalc.models import MODELS, Model, Module, Weight
from memcalc.plan import Plan


def plan(model: str, micro_batch: int = 8) -> Plan:
    return Plan(model=MODELS[model], tokens=32 if MODELS[model].context else 0, micro_batch=micro_batch, device="cpu")


GPT, MLP = plan("gpt2-tiny"), plan("mlp-tiny")


def all_of(samples: Samples) -> tuple[np.ndarray, np.ndarray]:
    return samples.take(np.arange(samples.count))


def test_default_is_real_text_and_the_same_every_time() -> None:
    first, second = load(GPT, None), load(GPT, None)
    assert first.count == second.count > 1000
    inputs, targets = first.take(np.array([7, 3]))
    assert (inputs.shape, inputs.dtype, targets.dtype) == ((2, 32), np.int64, np.int64)
    assert np.array_equal(inputs[:, 1:], targets[:, :-1])
    assert np.array_equal(inputs, second.take(np.array([7, 3]))[0])
    assert b"import " in load(GPT, None).take(np.arange(2000))[0].astype(np.uint8).tobytes()


def test_masked_words_are_the_same_share_of_every_sample() -> None:
    bert = plan("bert-tiny")
    inputs, targets = load(bert, None).take(np.array([5, 9]))
    plain, _ = load(GPT, None).take(np.array([5, 9]))
    hidden = targets != -100
    assert hidden.sum(axis=1).tolist() == [5, 5]  # 15 % of 32
    assert (inputs[hidden] == bert.model.vocab - 1).all() and (targets[hidden] == plain[hidden]).all()
    assert (inputs[~hidden] == plain[~hidden]).all()
    again, _ = load(bert, None).take(np.array([9]))
    assert np.array_equal(again[0], inputs[1])


def test_a_decoder_goes_on_where_the_encoder_ends() -> None:
    inputs, targets = load(plan("t5-tiny"), None).take(np.array([0, 3]))
    assert (inputs.shape, targets.shape) == ((2, 64), (2, 32))
    assert np.array_equal(inputs[:, 33:], targets[:, :-1])


def test_colours_come_first_for_convolutions(tmp_path: Path) -> None:
    pictures = np.arange(4 * 32 * 32 * 3, dtype=np.uint32).reshape(4, 32, 32, 3) % 256
    np.save(tmp_path / "images.npy", pictures.astype(np.uint8))
    np.save(tmp_path / "labels.npy", np.arange(4))
    inputs, labels = all_of(load(plan("resnet-tiny"), tmp_path))
    first = inputs[labels == 2].reshape(3, 32, 32) * 255
    assert np.allclose(first, np.moveaxis(pictures[2], -1, 0))


def test_bytes_of_a_file_and_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"b" * 40)
    (tmp_path / "a.txt").write_bytes(b"a" * 40)
    (tmp_path / "model.bin.gz").write_bytes(b"\0\1\2")
    (tmp_path / ".hidden").write_bytes(b"h" * 40)
    inputs, targets = all_of(load(GPT, tmp_path))
    assert bytes(inputs.flatten().tolist()) == b"a" * 40 + b"b" * 24
    assert targets[-1, -1] == ord("b")


def test_nanogpt_bin(tmp_path: Path) -> None:
    np.arange(0, 200, dtype=np.uint16).tofile(tmp_path / "train.bin")
    inputs, targets = all_of(load(GPT, tmp_path / "train.bin"))
    assert np.array_equal(inputs.flatten(), np.arange(192)) and np.array_equal(targets.flatten(), np.arange(1, 193))


def test_a_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, **{f"w{i}": i for i in range(1, 9)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("w1 w2 nothing w8 " * 80)
    inputs, _ = all_of(load(GPT, tmp_path / "text.txt", tmp_path / "tokenizer.json"))
    assert inputs[0, :4].tolist() == [1, 2, 0, 8]
    check(GPT, tmp_path / "text.txt", tmp_path / "tokenizer.json")
    text, bin_ = tmp_path / "text.txt", tmp_path / "ids.bin"
    bin_.write_bytes(binary(*range(200)))
    for name, content, data, message in (
        ("none.json", None, text, "does not exist"),
        ("list.json", b"[]", text, "is none of the library tokenizers"),
        ("object.json", b"{}", text, "is none of the library tokenizers"),
        ("odd.json", b'{"model": 5}', text, "cannot be used"),
        ("torn.json", (tmp_path / "tokenizer.json").read_bytes()[:-9], text, "is not valid JSON"),
        ("binary.json", b"\xff\xfe\0", text, "is not UTF-8"),
        ("empty.json", b"", text, "is empty"),
        ("tokenizer.json", None, bin_, "holds token ids already"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(MemcalcError, match=message) as caught:
            check(GPT, data, tmp_path / name)
        assert "\n" not in str(caught.value)


def test_what_lacks_in_the_beginning_of_a_text_may_come_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("a " * 400)
    monkeypatch.setattr("memcalc.data._LOOKED_AT", 100)
    check(GPT, tmp_path / "text.txt", tmp_path / "tokenizer.json")
    (tmp_path / "text.txt").write_text("a " * 60)
    with pytest.raises(InputError, match="has 60 tokens; at least 65 are needed"):
        check(GPT, tmp_path / "text.txt", tmp_path / "tokenizer.json")


def test_features_of_text() -> None:
    inputs, targets = load(MLP, None).take(np.arange(50))
    assert (inputs.shape, inputs.dtype) == ((50, 256), np.float32)
    assert 0 <= inputs.min() < inputs.max() <= 1
    assert targets.min() >= 0 and len(set(targets.tolist())) > 3 and targets.max() < 10


def images(tmp_path: Path, shape: tuple[int, ...] = (20, 16, 16), dtype: type = np.uint8, labels: int = 10) -> Path:
    np.save(tmp_path / "images.npy", np.arange(np.prod(shape)).reshape(shape).astype(dtype))
    np.save(tmp_path / "labels.npy", np.arange(shape[0]) % labels)
    return tmp_path


def test_arrays_of_images_are_flattened_scaled_and_shuffled(tmp_path: Path) -> None:
    inputs, targets = all_of(load(MLP, images(tmp_path)))
    assert (inputs.shape, inputs.dtype, inputs.max()) == ((20, 256), np.float32, 1.0)
    raw = np.load(tmp_path / "images.npy").reshape(20, -1)
    assert sorted(targets.tolist()) == sorted([*range(10)] * 2) and targets.tolist() != [*range(10)] * 2
    assert all(
        any(np.allclose(row * 255, raw[i]) and label == i % 10 for i in range(20))
        for row, label in zip(inputs, targets, strict=True)
    )


def test_class_folders_of_arrays(tmp_path: Path) -> None:
    for label, name in enumerate(["cats", "dogs"]):
        (tmp_path / name).mkdir()
        for i in range(3):
            np.save(tmp_path / name / f"{i}.npy", np.full((16, 16), float(label), dtype=np.float32))
    inputs, targets = all_of(load(MLP, tmp_path))
    assert np.array_equal(inputs[:, 0], targets) and sorted(targets) == [0, 0, 0, 1, 1, 1]


def test_pictures_need_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / "1.png").write_bytes(b"no picture")
    real = builtins.__import__

    def without(name: str, *rest: object) -> object:
        if name.startswith("PIL"):
            raise ImportError(name)
        return real(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match="needs the package pillow"):
        load(MLP, tmp_path)


def pictures(folder: Path, *sizes: tuple[int, int]) -> Path:
    """Two folders of classes with pictures of those sizes."""
    image = pytest.importorskip("PIL.Image")
    for index, size in enumerate(sizes):
        (folder / f"class-{index % 2}").mkdir(exist_ok=True)
        image.new("L", size, index).save(folder / f"class-{index % 2}" / f"{index}.png")
    return folder


def damaged(folder: Path) -> Path:
    path = pictures(folder, (9, 9), (9, 9), (9, 9)) / "class-0" / "2.png"
    path.write_bytes(path.read_bytes()[:45])  # its header says a size, and no more comes
    return folder


def test_pictures_are_decoded_when_they_are_taken(tmp_path: Path) -> None:
    rgb = Plan(model=replace(MODELS["mlp-tiny"], features=243), micro_batch=1, device="cpu")
    damaged(tmp_path)
    samples = load(rgb, tmp_path)  # headers alone
    assert samples.count == 3
    with pytest.raises(FileError, match=r"2\.png is not a picture"):
        samples.take(np.arange(3))
    with pytest.raises(FileError, match=r"2\.png is not a picture"):
        check(rgb, tmp_path, None)
    pictures(tmp_path, (9, 9), (9, 9), (9, 9))
    os.mkfifo(tmp_path / "class-0" / "pipe.png")  # would be waited for
    check(rgb, tmp_path, None)
    inputs, targets = all_of(load(rgb, tmp_path))
    assert sorted(zip((inputs * 255).max(axis=1).round(), targets, strict=True)) == [(0, 0), (1, 1), (2, 0)]


def write(name: str, content: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return make


def binary(*tokens: int) -> bytes:
    return np.array(tokens, dtype=np.uint16).tobytes()


BROKEN: dict[str, tuple[object, Callable[[Path], Path], str]] = {
    "missing": (GPT, lambda folder: folder / "none", "does not exist"),
    "empty": (GPT, write("a.txt", b""), "is empty"),
    "no text": (GPT, write("a.txt", b"a\0b"), "is not text"),
    "empty folder": (GPT, lambda folder: folder, "holds no text files"),
    "one binary": (GPT, lambda folder: write("a.txt", b"a\0" * 99)(folder).parent, "holds no text files"),
    "no class folders": (MLP, lambda folder: write("a.png", b"a\0")(folder).parent, "one folder per class"),
    "not one step": (
        GPT,
        write("a.txt", b"a" * 200),
        "gives 5 samples to train on; one step needs 8 (micro batch 8 x accum",
    ),
    "uneven pictures": (MLP, lambda folder: pictures(folder, (9, 9), (9, 9), (9, 8)), "2.png is 8x9x3, and "),
    "damaged picture": (MLP, damaged, "2.png is not a picture"),
    "odd bin": (GPT, write("a.bin", b"abc"), "has 3 bytes"),
    "empty bin": (GPT, write("a.bin", b""), "has 0 bytes"),
    "large token": (GPT, write("a.bin", binary(*range(300))), "holds token 299, but gpt2-tiny has a vocabulary of 256"),
    "short": (GPT, write("a.txt", b"a" * 64), "has 64 tokens; at least 65 are needed"),
    "no labels": (MLP, write("a.npy", b""), "has no labels"),
    "labels missing": (
        MLP,
        lambda folder: np.save(folder / "images.npy", np.zeros((4, 256))) or folder,
        "labels.npy does not exist",
    ),
    "no array": (MLP, lambda folder: write("images.npy", b"junk")(folder).parent, "is not a numpy array"),
    "wrong size": (
        MLP,
        lambda folder: images(folder, (20, 4, 4)),
        "has images of 4x4 = 16 values, but mlp-tiny reads 256",
    ),
    "wrong labels": (MLP, lambda folder: images(folder, labels=11), "labels outside 0 to 9"),
    "pickled": (
        MLP,
        lambda folder: np.save(folder / "images.npy", np.array([{}]), allow_pickle=True) or folder,
        "is not a numpy array",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_data_is_one_clear_line(tmp_path: Path, name: str) -> None:
    made, prepare, message = BROKEN[name]
    with pytest.raises(MemcalcError) as caught:
        check(made, prepare(tmp_path), None)  # type: ignore[arg-type]
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may read everything
    with pytest.raises(FileError, match=f"^data {tmp_path} cannot be read: no permission$"):
        check(MLP, tmp_path, None)


def test_a_module_whose_input_is_not_known() -> None:
    weights = (Weight("0.weight", (4, 8), "0"),)
    net = Model(name="Net", family="module", layers=1, module=Module(factory="net.py:Net", weights=weights))
    for data in (None, Path(__file__)):
        with pytest.raises(InputError, match="what Net reads is not known: make its plan with --input-shape"):
            check(Plan(model=net, device="cpu"), data, None)
    sampled = Plan(model=replace(net, module=replace(net.module, sample="net.py:batch")), micro_batch=1, device="cpu")
    check(sampled, None, None)
    with pytest.raises(
        InputError, match=r"--data .*test_data\.py is not read: batches come from net.py:batch; leave it out"
    ):
        check(sampled, Path(__file__), None)


def test_split_keeps_evaluation_apart() -> None:
    samples = Samples(count=50, take=lambda indices: (indices, indices), source="text")
    training, held_out = split(samples, GPT)
    assert (len(training), len(held_out)) == (45, 5) and not set(training) & set(held_out)
    with pytest.raises(InputError, match="gives 45 samples to train on; one step needs 46"):
        split(samples, plan("gpt2-tiny", 46))
