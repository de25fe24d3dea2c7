"""Models that take images: what their stages see is what the whole model sees, and no bytes of an image do harm."""

from __future__ import annotations

import gc
import io
import struct
import weakref
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer

from neurogrid.errors import CheckpointError, ConfigurationError, UnsupportedModelError
from neurogrid.inference.generation.prefixes import reusable
from neurogrid.inference.generation.sight import SeenImages
from neurogrid.model.files.checkpoint import Checkpoint
from neurogrid.model.files.config import build_config
from neurogrid.model.files.tensor_names import is_image_tensor, name_in_text_model
from neurogrid.model.images import places
from neurogrid.model.images import reader as images_reader
from neurogrid.model.images.decoding import MAX_IMAGE_PIXELS, decode_image
from neurogrid.model.images.places import ImagePlaces, ImageWay
from neurogrid.model.images.reader import ImageReader, TooManyTokensError
from neurogrid.model.images.turns import ImagesInTurn
from neurogrid.model.proof.miniature_images import check_images
from neurogrid.model.proof.miniature_split import Split
from neurogrid.model.stages.image_tower import ImageTower
from neurogrid.p2p.wire import ImageSpan, decode_image_spans, encode_image_spans
from tests.image_models import IMAGE_MODELS, png, some_image, write_image_model


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """A checkpoint of each family, and its model."""
    found = {}
    for family in IMAGE_MODELS:
        folder = tmp_path_factory.mktemp(family)
        found[family] = folder, write_image_model(folder, family)
    return found


@pytest.mark.parametrize("family", IMAGE_MODELS)
def test_stages_see_what_the_whole_model_sees(
    written: dict[str, tuple[Path, Any]], family: str
) -> None:
    """Two images in a conversation, through two stages and three: the logits of each of five steps."""
    folder, model = written[family]
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.image_config is not None
    config = build_config(checkpoint.config)
    tower = ImageTower(
        checkpoint.image_config,
        dtype=torch.float32,
        device="cpu",
        tensors=checkpoint.image_tensors(),
    )
    reader = ImageReader.open(folder, model_type=family, token_id=tower.token_id)
    image, text = {"type": "image"}, {"type": "text", "text": "and"}
    prompt = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": [image, text, image]}],
        add_generation_prompt=True,
        tokenize=False,
    )
    files = [png(some_image(1)), png(some_image(2, width=30, height=31))]
    token_ids, images = reader.read(prompt, files)
    made = {
        name: each
        for name, each in images.tensors.items()
        if name in ("pixel_values", "image_grid_thw", "token_type_ids", "mm_token_type_ids")
    }
    input_ids = torch.tensor([token_ids])
    output = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        **made,
        max_new_tokens=5,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    new_ids = output.sequences[0, len(token_ids) :].tolist()
    where = ImagePlaces(images.spans, places.image_way(config))
    found = tower.embeddings(images.tensors, [span.num_tokens for span in images.spans])
    seen = SeenImages(where, images.digests, tuple(found))
    tensors = {
        name_in_text_model(name): each
        for name, each in _tensors_of(folder).items()
        if not is_image_tensor(name)
    }
    for cuts in ((2,), (1, 3)):
        session = Split(config, tensors, cuts).new_session(where, seen.between(0, len(token_ids)))
        for step, logits in enumerate(output.logits):
            got = session.step(token_ids if not step else [new_ids[step - 1]])
            torch.testing.assert_close(
                got, logits[0], rtol=0, atol=1e-5 * float(logits.abs().max())
            )


def _tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("family", IMAGE_MODELS)
def test_each_family_is_proven_and_no_other_way_of_seeing_is(
    written: dict[str, tuple[Path, Any]], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Checkpoint.open(written[family][0]).image_config
    assert config is not None
    check_images(config)
    if family == "llava":
        return
    monkeypatch.setattr(places, "_WAYS", {})
    with pytest.raises(UnsupportedModelError, match="do not give the logits of the whole model"):
        check_images(config)


def test_positions_in_a_plane_are_those_of_transformers(
    written: dict[str, tuple[Path, Any]],
) -> None:
    """Also of pieces that end within an image."""
    model = written["qwen2_5_vl"][1]
    spans = (ImageSpan(3, 2, 4), ImageSpan(14, 5, 1), ImageSpan(19, 1, 1), ImageSpan(21, 3, 3))
    where = ImagePlaces(spans, ImageWay.PLANE)
    length = 40
    types = torch.zeros(1, length, dtype=torch.int32)
    for span in spans[:2] + spans[3:]:  # theirs takes images that touch for one
        types[0, span.start : span.stop] = 1
    apart = ImagePlaces(spans[:2] + spans[3:], ImageWay.PLANE)
    grids = torch.tensor([[1, 2 * span.rows, 2 * span.columns] for span in apart.spans])
    expected, shift = model.model.get_rope_index(
        torch.ones(1, length, dtype=torch.long), types, image_grid_thw=grids
    )
    assert torch.equal(apart.positions(0, length), expected)
    assert apart.shift(length) == int(shift)
    for middle in range(1, length):
        in_pieces = [where.positions(0, middle), where.positions(middle, length)]
        assert torch.equal(torch.cat(in_pieces, dim=2), where.positions(0, length))


def test_images_that_differ_share_no_prefix_and_none_is_cut() -> None:
    where = ImagePlaces((ImageSpan(10, 1, 16),), ImageWay.BOTH_WAYS)
    tokens = [*range(10), *[99] * 16, *range(10)]
    one, other = (
        SeenImages(where, (digest,), (torch.zeros(16, 4),)) for digest in (b"a" * 32, b"b" * 32)
    )
    for wanted, shared in ((one, 35), (other, 10)):
        length = reusable(
            one.identities(tokens),
            [36],
            wanted.identities(tokens),
            shortest_cut=lambda length: 0,
            replays=False,
        )
        assert length == shared
    # A text of the same ids is no image.
    assert (
        reusable(one.identities(tokens), [36], tokens, shortest_cut=lambda n: 0, replays=False)
        == 10
    )
    assert [one.outside(length) for length in (10, 11, 25, 26, 30)] == [10, 10, 10, 26, 30]
    assert one.whole(0, [12, 12, 12]) == [36]
    assert one.whole(0, [10, 16, 10]) == [10, 16, 10]
    assert one.whole(26, [5, 5]) == [5, 5]
    ((start, part),) = one.between(8, 14)
    assert (start, len(part)) == (2, 4)
    assert one.told == encode_image_spans(where.spans)
    assert decode_image_spans(one.told, max_length=26) == where.spans
    apart = SeenImages(ImagePlaces(where.spans, ImageWay.AS_TEXT), (b"a" * 32,), one.embeddings)
    assert apart.told == b""
    assert apart.whole(0, [12, 12, 12]) == [12, 12, 12]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_formats(kind: str) -> None:
    assert decode_image(png(some_image(3), kind)).size == (40, 24)


def test_first_frame_and_what_a_camera_says() -> None:
    frames = [some_image(seed) for seed in range(3)]
    written = io.BytesIO()
    frames[0].save(written, "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    assert decode_image(written.getvalue()).tobytes() == frames[0].tobytes()
    turned = Image.Exif()
    turned[0x0112] = 6
    written = io.BytesIO()
    some_image(1).save(written, "JPEG", exif=turned)
    assert decode_image(written.getvalue()).size == (24, 40)
    assert decode_image(png(some_image(1).convert("RGBA"))).mode == "RGB"


def _huge_png(side: int) -> bytes:
    """A file of some bytes that says it is of side x side pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        body = name + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no image in PNG, JPEG, WEBP or GIF"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image in"),
        (png(some_image(1), "BMP"), "no image in"),
        (png(some_image(1))[:200], "broken"),
        (png(some_image(1), "JPEG")[:100], "broken|no image"),
        (_huge_png(int(MAX_IMAGE_PIXELS**0.5) + 1), "40,000,000 in all is the limit"),
        (_huge_png(60_000), "limit"),
        (b"\x00" * (20 * 1024 * 1024 + 1), "20,971,520 is the limit"),
    ],
)
def test_what_is_no_image_is_refused_in_a_sentence(data: bytes, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        decode_image(data)


TURNED = (0x0112, 3, 6 << 16)


@pytest.mark.parametrize(
    ("kind", "entries"),
    [
        # Ends before it says where its tags are.
        ("PNG", None),
        ("WEBP", None),
        # A resolution that is text; a width that is a fraction.
        *((kind, [TURNED, (0x011A, 2, 0x61000000)]) for kind in ("PNG", "JPEG", "WEBP")),
        *((kind, [TURNED, (0x0100, 5, 8)]) for kind in ("PNG", "JPEG", "WEBP")),
    ],
)
def test_what_a_camera_says_wrongly_is_refused_in_a_sentence(
    kind: str, entries: list[tuple[int, int, int]] | None
) -> None:
    told = b"MM\0*"
    if entries is not None:
        tags = b"".join(struct.pack(">HHII", tag, form, 1, value) for tag, form, value in entries)
        told += struct.pack(">IH", 8, len(entries)) + tags + bytes(4)
    written = io.BytesIO()
    some_image(1).save(written, kind, exif=b"Exif\0\0" + told)
    with pytest.raises(ConfigurationError, match="it is broken"):
        decode_image(written.getvalue())


def test_a_processor_that_is_not_there_is_said(
    written: dict[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json or processor_config"):
        ImageReader.open(tmp_path, model_type="llava", token_id=6)
    with pytest.raises(UnsupportedModelError, match="no processor"):
        ImageReader.open(tmp_path, model_type="llama", token_id=6)


def test_a_tower_is_transformers_own(written: dict[str, tuple[Path, Any]]) -> None:
    """What is loaded of it alone gives the same bits."""
    folder, _ = written["llava"]
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.image_config is not None
    whole: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    pixels = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        expected = whole.get_image_features(pixel_values=pixels, return_dict=True).pooler_output
    tower = ImageTower(
        checkpoint.image_config,
        dtype=torch.float32,
        device="cpu",
        tensors=checkpoint.image_tensors(),
    )
    got = tower.embeddings({"pixel_values": pixels, "other": pixels}, [16, 16])
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def _conversation(folder: Path, num_images: int) -> str:
    content = [{"type": "image"}] * num_images
    text: str = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    return text


def _reader(written: dict[str, tuple[Path, Any]], family: str) -> tuple[Path, ImageReader]:
    folder, _ = written[family]
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.image_config is not None
    tower = ImageTower(
        checkpoint.image_config,
        dtype=torch.float32,
        device="cpu",
        tensors=checkpoint.image_tensors(),
    )
    return folder, ImageReader.open(folder, model_type=family, token_id=tower.token_id)


@pytest.mark.parametrize("family", IMAGE_MODELS)
def test_one_image_at_a_time_is_decoded(
    written: dict[str, tuple[Path, Any]], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen of 40 million pixels would take gigabytes together."""
    folder, reader = _reader(written, family)
    decoded: list[weakref.ref[Image.Image]] = []
    most = 0

    def decode(data: bytes) -> Image.Image:
        nonlocal most
        gc.collect()
        image = decode_image(data)
        decoded.append(weakref.ref(image))
        most = max(most, sum(each() is not None for each in decoded))
        return image

    monkeypatch.setattr(images_reader, "decode_image", decode)
    files = [png(some_image(seed, width=30 + 9 * seed)) for seed in range(4)]
    reader.read(_conversation(folder, len(files)), files)
    assert most == 1


@pytest.mark.parametrize("family", IMAGE_MODELS)
def test_images_in_turn_are_what_they_are_together(
    written: dict[str, tuple[Path, Any]], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, reader = _reader(written, family)
    turned = Image.Exif()
    turned[0x0112] = 6
    last = io.BytesIO()
    some_image(5).save(last, "PNG", exif=turned)
    files = [
        png(some_image(1)),
        png(some_image(2, width=30, height=61)),
        png(some_image(3).convert("P")),
        last.getvalue(),
    ]
    text = _conversation(folder, len(files))
    token_ids, images = reader.read(text, files)
    assert reader._turns.is_possible
    monkeypatch.setattr(reader._turns, "is_possible", False)
    expected_ids, expected = reader.read(text, files)
    assert token_ids == expected_ids
    assert (images.spans, images.digests) == (expected.spans, expected.digests)
    assert images.tensors.keys() == expected.tensors.keys()
    for name, each in images.tensors.items():
        assert torch.equal(each, expected.tensors[name])


def test_images_that_have_to_be_decoded_at_once_are_bounded(
    written: dict[str, tuple[Path, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, reader = _reader(written, "llava")
    files = [png(some_image(seed)) for seed in range(3)]
    text = _conversation(folder, len(files))
    monkeypatch.setattr(images_reader, "MAX_PIXELS_AT_ONCE", 2 * 40 * 24)
    reader.read(text, files)  # they take turns
    monkeypatch.setattr(reader._turns, "is_possible", False)
    with pytest.raises(ConfigurationError, match="2,880 pixels together, and 1,920 is the limit"):
        reader.read(text, files)


def test_images_with_more_tokens_than_a_session_are_not_all_looked_at(
    written: dict[str, tuple[Path, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, reader = _reader(written, "qwen2_5_vl")
    files = [png(some_image(seed, width=200, height=200)) for seed in range(4)]
    text = _conversation(folder, len(files))
    _, images = reader.read(text, files)
    each = images.spans[0].num_tokens
    reader.read(text, files, max_tokens=4 * each)
    num_decoded = 0

    def decode(data: bytes) -> Image.Image:
        nonlocal num_decoded
        num_decoded += 1
        return decode_image(data)

    monkeypatch.setattr(images_reader, "decode_image", decode)
    with pytest.raises(TooManyTokensError, match=f"the first 2 of 4 images have {2 * each} tokens"):
        reader.read(text, files, max_tokens=2 * each - 1)
    assert num_decoded == 2


class OfOneSize:
    """A processor of images that brings all of them to the size of the largest."""

    def __call__(self, images: list[Image.Image], **more: Any) -> dict[str, torch.Tensor]:
        width, height = (max(each.size[i] for each in images) for i in (0, 1))
        return {"pixel_values": torch.zeros(len(images), 3, height, width)}


def test_a_processor_that_looks_at_several_together_is_found_out() -> None:
    assert not ImagesInTurn(OfOneSize()).is_possible


def test_what_is_wrong_with_an_image_is_said_with_its_number(
    written: dict[str, tuple[Path, Any]],
) -> None:
    folder, reader = _reader(written, "llava")
    good = png(some_image(1))
    for bad, reason in ((good[:200], "broken"), (b"no image", "no image in PNG")):
        with pytest.raises(ConfigurationError, match=f"image 2 cannot be read: it is .*{reason}"):
            reader.read(_conversation(folder, 2), [good, bad])


async def test_images_that_nobody_waits_for_any_more_are_not_decoded(
    written: dict[str, tuple[Path, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their client has gone: those of others have their turn."""
    folder, reader = _reader(written, "llava")
    files = [png(some_image(seed)) for seed in range(4)]
    text = _conversation(folder, len(files))
    request = trio.CancelScope()
    num_decoded = 0

    def decode(data: bytes) -> Image.Image:
        nonlocal num_decoded
        num_decoded += 1
        if num_decoded == 2:
            trio.from_thread.run_sync(request.cancel)
        return decode_image(data)

    monkeypatch.setattr(images_reader, "decode_image", decode)
    read = partial(reader.read, text, files, on_image=trio.from_thread.check_cancelled)
    with request:
        await trio.to_thread.run_sync(read)
    assert request.cancelled_caught
    assert num_decoded == 2
    reader.read(text, files)
    assert num_decoded == 6
