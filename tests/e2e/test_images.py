"""Images through real workers: what transformers' own `generate` answers, whoever is lost, and whatever is sent."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import pytest
import torch
import trio
from transformers import AutoTokenizer

from neurogrid import Coordinator, CoordinatorSettings, open_coordinator
from neurogrid.errors import NoRouteError
from neurogrid.inference.generation.sampling import GeneratedToken
from neurogrid.model.images.reader import ImageInputs
from neurogrid.p2p.wire import PROTOCOL_V10
from tests.e2e.server_process import ServerProcess, start_server
from tests.e2e.support import DEADLINE, WorkerProcess, start_worker
from tests.image_models import IMAGE_MODELS, png, some_image, write_image_model

MAX_TOKENS = 16
QUESTION = "what is this?"
ONE, OTHER = png(some_image(1)), png(some_image(2, width=30, height=33), "JPEG")


def text_of(folder: Path, *parts: str, tokenizer: Any = None) -> str:
    """A conversation of one message, of texts and of images, which are empty."""
    told = [{"type": "text", "text": part} if part else {"type": "image"} for part in parts]
    tokenizer = tokenizer or AutoTokenizer.from_pretrained(folder)
    return str(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": told}], add_generation_prompt=True, tokenize=False
        )
    )


def reference(model: Any, token_ids: Sequence[int], images: ImageInputs | None) -> list[int]:
    """What transformers generates, greedily."""
    input_ids = torch.tensor([token_ids])
    inputs = {} if images is None else dict(images.tensors)
    inputs.pop("num_crops", None)
    output = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        **inputs,
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
    )
    found: list[int] = output[0, len(token_ids) :].tolist()
    return found[:-1] if found[-1] == 1 else found


async def generate(
    coordinator: Coordinator,
    token_ids: Sequence[int],
    images: ImageInputs | None,
    after_some: Callable[[], Awaitable[None]] | None = None,
) -> tuple[list[int], int]:
    """The tokens, and how many of the prompt were not computed."""
    tokens: list[GeneratedToken] = []
    generating = coordinator.generate_tokens(token_ids, max_tokens=MAX_TOKENS, images=images)
    async with aclosing(generating):
        async for token in generating:
            tokens.append(token)
            if len(tokens) == 4 and after_some is not None:
                await after_some()
    found = [token.token_id for token in tokens if token.finish_reason != "stop"]
    return found, tokens[0].num_reused


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def in_time() -> None:
        with trio.fail_after(DEADLINE):
            await main()

    trio.run(in_time)


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[WorkerProcess]]:
    """Workers of which tests kill one each, and take it off."""
    directories = [tmp_path_factory.mktemp("mortal") for _ in range(4)]
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        starting = [start_worker(directory) for directory in directories]
        yield list(pool.map(stack.enter_context, starting))


@pytest.mark.parametrize("family", IMAGE_MODELS)
def test_a_family_through_two_stages_and_around_a_lost_worker(
    mortal: list[WorkerProcess], tmp_path: Path, family: str
) -> None:
    """One image, another in its place, both, the first again, beside a text; and a worker is killed.

    Where layers need not know of images, what a lost worker takes is what other tests lose with one.
    """
    model = write_image_model(tmp_path, family)

    async def main() -> None:
        workers = list(mortal)
        settings = CoordinatorSettings(
            model=tmp_path,
            peers=tuple(worker.address for worker in workers),
            stages=2,
            max_seq_len=256,
            max_sessions=6,
            dtype="float32",
        )
        async with open_coordinator(settings) as coordinator:
            sight = coordinator.model.sight
            assert sight is not None, coordinator.model.why_no_sight
            read = sight.reader.read
            about = text_of(tmp_path, "", QUESTION)
            cases: list[tuple[list[int], Any]] = [
                read(about, [ONE]),
                read(about, [OTHER]),
                read(text_of(tmp_path, "", "and", "", QUESTION), [ONE, OTHER]),
                (coordinator.model.tokenizer.encode("<|user|>only words<|assistant|>"), None),
            ]
            expected = [reference(model, *case) for case in cases]
            assert expected[0] != expected[1], "the images make no difference"
            reused = []
            for case, tokens in zip(cases, expected, strict=True):
                got, num_reused = await generate(coordinator, *case)
                assert got == tokens
                reused.append(num_reused)
            # The same text about another image: what stands before that, at most.
            assert reused[1] <= cases[1][1].spans[0].start
            got, num_reused = await generate(coordinator, *cases[0])
            assert got == expected[0]
            # Windows have dropped what they would be cut back to.
            assert num_reused == (0 if family == "gemma3" else len(cases[0][0]) - 1)
            # The next turn of a conversation goes on behind the image.
            token_ids, images = cases[1]
            turn = [*token_ids, *expected[1], 20, 21, 22]
            got, num_reused = await generate(coordinator, turn, images)
            assert num_reused >= len(token_ids)
            assert got == reference(model, turn, _longer(images, len(turn)))
            # All at once, and a worker is lost.
            by_peer = {worker.peer_id: worker for worker in workers}

            meeting = {index for index, tokens in enumerate(expected) if len(tokens) > 4}
            assert len(meeting) > 1
            have_met = trio.Event()

            async def meet(index: int) -> None:
                """Kill, once all have more to come: on two workers at most, of which it is one."""
                meeting.remove(index)
                if not meeting:
                    lost = by_peer[coordinator.stages[1].peer_id]
                    mortal.remove(lost)
                    lost.kill()
                    have_met.set()
                await have_met.wait()

            while len(coordinator.fleet.holdings) < 3:  # one stands by
                await trio.sleep(0.05)
            together: dict[int, list[int]] = {}

            async def one(index: int) -> None:
                is_met = index in meeting and family != "llava"
                after = partial(meet, index) if is_met else None
                together[index], _ = await generate(coordinator, *cases[index], after)

            async with trio.open_nursery() as nursery:
                for index in range(len(cases)):
                    nursery.start_soon(one, index)
            assert [together[index] for index in range(len(cases))] == expected
            num_reroutes = sum(each.num_reroutes for each in coordinator.status().requests)
            assert num_reroutes >= 1 or family == "llava"

    run(main)


def _longer(images: ImageInputs | None, length: int) -> ImageInputs:
    """The same images in a longer prompt: transformers wants the type of each token."""
    assert images is not None
    tensors = {
        name: torch.nn.functional.pad(each, (0, length - each.shape[1]))
        if name.endswith("token_type_ids")
        else each
        for name, each in images.tensors.items()
    }
    return ImageInputs(images.spans, images.digests, tensors)


def test_workers_that_do_not_know_where_images_are_see_none(
    workers: list[WorkerProcess], tmp_path: Path
) -> None:
    """A model whose layers need not know is served by them all the same."""
    for family in ("llava", "gemma3"):
        folder = tmp_path / family
        folder.mkdir()
        model = write_image_model(folder, family)

        async def main(folder: Path = folder, family: str = family, model: Any = model) -> None:
            settings = CoordinatorSettings(
                model=folder,
                peers=tuple(worker.address for worker in workers[:2]),
                stages=2,
                max_seq_len=256,
                dtype="float32",
                protocol_versions=(PROTOCOL_V10,),
            )
            async with open_coordinator(settings) as coordinator:
                sight = coordinator.model.sight
                assert sight is not None
                prompt = sight.reader.read(text_of(folder, "", QUESTION), [ONE])
                if family == "llava":
                    got, _ = await generate(coordinator, *prompt)
                    # Activations of 1.0.0 are float16.
                    assert got[:2] == reference(model, *prompt)[:2]
                else:
                    with pytest.raises(NoRouteError, match="does not know where images are"):
                        await generate(coordinator, *prompt)

        run(main)


# ------------------------------------------------------------------ over HTTP


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("llava") / "seer"
    folder.mkdir()
    return folder, write_image_model(folder, "llava")


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory,
    workers: list[WorkerProcess],
    llava: tuple[Path, Any],
) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("server")
    peers = [part for worker in workers[:2] for part in ("--peer", worker.address)]
    model = ("--model", str(llava[0]))
    with start_server(directory, *peers, *model, "--stages", "2", "--dtype", "float32") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    url = f"{server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=DEADLINE) as client:
        yield client


def url_of(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{b64encode(data).decode()}"


def parts(*urls: str) -> list[Any]:
    return [
        *({"type": "image_url", "image_url": {"url": url, "detail": "auto"}} for url in urls),
        {"type": "text", "text": QUESTION},
    ]


def answer_of(llava: tuple[Path, Any], data: bytes) -> tuple[str, int]:
    """What transformers answers about an image, and the tokens of its prompt."""
    from neurogrid.model.images.reader import ImageReader

    folder, model = llava
    tokenizer = AutoTokenizer.from_pretrained(folder)
    reader = ImageReader.open(folder, model_type="llava", token_id=model.config.image_token_id)
    token_ids, images = reader.read(text_of(folder, "", QUESTION, tokenizer=tokenizer), [data])
    found = reference(model, token_ids, images)
    return str(tokenizer.decode(found, skip_special_tokens=True)), len(token_ids)


def test_the_openai_client(client: openai.OpenAI, llava: tuple[Path, Any]) -> None:
    (entry,) = client.models.list().data
    assert entry.model_dump()["input_modalities"] == ["text", "image"]
    for data, kind in ((ONE, "image/png"), (OTHER, "image/jpeg")):
        expected, num_tokens = answer_of(llava, data)
        chat = client.chat.completions.create(
            model="seer",
            messages=[{"role": "user", "content": parts(url_of(data, kind))}],
            max_tokens=MAX_TOKENS,
            temperature=0,
        )
        assert chat.choices[0].message.content == expected
        assert chat.usage is not None
        assert chat.usage.prompt_tokens == num_tokens > 20
        streamed = client.chat.completions.create(
            model="seer",
            messages=[{"role": "user", "content": parts(url_of(data, kind))}],
            max_tokens=MAX_TOKENS,
            temperature=0,
            stream=True,
        )
        pieces = [chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices]
        assert "".join(pieces) == expected
        response = client.responses.create(
            model="seer",
            input=[
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": url_of(data, kind), "detail": "auto"},
                        {"type": "input_text", "text": QUESTION},
                    ],
                }
            ],
            max_output_tokens=MAX_TOKENS,
            temperature=0,
        )
        assert response.output_text == expected
        assert response.usage is not None
        assert response.usage.input_tokens == num_tokens


def test_ollamas_client(server: ServerProcess, llava: tuple[Path, Any]) -> None:
    expected, num_tokens = answer_of(llava, ONE)
    options = {"temperature": 0, "num_predict": MAX_TOKENS}
    with ollama.Client(host=server.url, timeout=DEADLINE) as client:
        message = {"role": "user", "content": QUESTION, "images": [b64encode(ONE).decode()]}
        chat = client.chat(model="seer", messages=[message], options=options)
        assert (chat.message.content, chat.prompt_eval_count) == (expected, num_tokens)
        made = client.generate(model="seer", prompt=QUESTION, images=[ONE], options=options)
        assert made.response == expected
        assert "vision" in (client.show("seer").capabilities or [])


@pytest.mark.parametrize(
    ("urls", "reason"),
    [
        (("https://example.org/cat.png",), "images are not fetched here"),
        (("file:///etc/passwd",), "images are not fetched here"),
        (("data:image/png,abc",), "not in base64"),
        (("data:image/png;base64,%%%",), "no base64"),
        (("data:image/png;base64,",), "is empty"),
        ((url_of(b"GIF89a"),), "image 1 cannot be read"),
        ((url_of(ONE), url_of(ONE[:300])), "image 2 cannot be read: it is broken"),
        ((url_of(ONE),) * 17, "17 images, and 16 is the limit"),
    ],
)
def test_bad_images_are_refused_in_a_sentence(
    server: ServerProcess, urls: tuple[str, ...], reason: str
) -> None:
    body = {"messages": [{"role": "user", "content": parts(*urls)}], "max_tokens": 4}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=DEADLINE)
    assert answer.status_code == 400, answer.text
    assert reason in answer.json()["error"]["message"]


def test_images_count_for_the_length(server: ServerProcess) -> None:
    (entry,) = httpx.get(f"{server.url}/v1/models", timeout=DEADLINE).json()["data"]
    words = "x" * (entry["max_model_len"] - 16)  # with those of an image it is too long
    content = [*parts(url_of(ONE))[:1], {"type": "text", "text": words}]
    body = {"messages": [{"role": "user", "content": content}]}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=DEADLINE)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
