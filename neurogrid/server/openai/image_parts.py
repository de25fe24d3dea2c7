"""Images in messages: data: URLs to bytes, and the parts of a message as a chat template wants them.

Nothing is fetched from an address that a client names: what this machine reaches, a client need not reach (a router, a
cloud's metadata, a service behind a firewall), and there is no list of addresses that would be safe to leave out.
"""

from __future__ import annotations

import binascii
import re
from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import Any, Final

from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.model.images.decoding import MAX_IMAGE_BYTES, MAX_IMAGES
from neurogrid.server.errors import APIError
from neurogrid.server.schema_check import Schema

__all__ = [
    "IMAGE_PART",
    "MAX_IMAGE_BODY_BYTES",
    "MAX_URL_CHARS",
    "input_modalities",
    "read_images",
    "require_sight",
]

MAX_IMAGE_BODY_BYTES: Final = 48 * 1024 * 1024
"""Bytes of a request's body where the model takes images: one of the largest in base64, and some more."""
# Four characters for three bytes, and what stands before them.
MAX_URL_CHARS: Final = MAX_IMAGE_BYTES // 3 * 4 + 1024

_DATA_URL: Final = re.compile(r"data:[^,;]{0,100}(?:;[^,;]{1,100}){0,4},", re.ASCII)

IMAGE_PART: Schema = {
    "type": "object",
    "required": ["type", "image_url"],
    "properties": {
        "type": {"type": "string", "enum": ["image_url"]},
        "image_url": {
            "type": "object",
            "required": ["url"],
            "properties": {
                "url": {
                    "type": "string",
                    "maxLength": MAX_URL_CHARS,
                    "description": "A data: URL in base64, of PNG, JPEG, WebP or GIF. Nothing is fetched.",
                },
                "detail": {
                    "type": ["string", "null"],
                    "maxLength": 16,
                    "description": "Taken and ignored: the model's processor decides.",
                },
            },
        },
    },
}
"""An image among the parts of a message."""


def input_modalities(*, sees: bool) -> list[str]:
    """Kinds of input that a model takes, as `/v1/models` tells them."""
    return ["text", "image"] if sees else ["text"]


def require_sight(model: LoadedModel, what: str, param: str) -> None:
    """Refuse an image, which `what` names, where the model takes none.

    Raises:
        APIError: 400, with the field.
    """
    if model.sight is None:
        raise APIError(
            400,
            f"{what} is an image, and this model takes none here ({model.why_no_sight}): leave it out, or ask a server "
            "whose model sees",
            param=param,
            code="unsupported_parameter",
        )


def read_images(messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """The images of a chat request, whose fields are checked, in order.

    Raises:
        APIError: 400, with the field.
    """
    images: list[bytes] = []
    for index, message in enumerate(messages):
        content = message.get("content")
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if part["type"] != "image_url":
                continue
            where = f"messages[{index}].content[{number}]"
            if message["role"] not in ("user", "tool"):
                raise _wrong(
                    f"{where} is an image of the {message['role']}: only users send them", where
                )
            images.append(_bytes_of(part["image_url"]["url"], f"{where}.image_url.url"))
    if len(images) > MAX_IMAGES:
        raise _wrong(f"there are {len(images)} images, and {MAX_IMAGES} is the limit", "messages")
    return images


def _bytes_of(url: str, where: str) -> bytes:
    found = _DATA_URL.match(url)
    if found is None:
        shown = url[:40] + ("..." if len(url) > 40 else "")
        raise _wrong(
            f"{where} is {shown!r}: images are not fetched here, send them as data:image/png;base64,...",
            where,
        )
    if not found[0].removesuffix(",").endswith(";base64"):
        raise _wrong(f"{where} is a data: URL that is not in base64", where)
    try:
        data = b64decode(url[found.end() :], validate=True)
    except binascii.Error as exc:
        raise _wrong(f"{where} is no base64: {exc}", where) from exc
    if not data:
        raise _wrong(f"{where} is empty", where)
    return data


def _wrong(message: str, param: str) -> APIError:
    return APIError(400, message, param=param, code="invalid_image")
