"""Names of models, and the files of a repository that a model is made of."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.errors import ConfigurationError
from neurogrid.hub.names import ModelName, model_place, parse_name
from neurogrid.hub.needed import companions, model_path, needed_files, shards, weights
from neurogrid.model.files.checkpoint_files import model_name_of

COMMIT = "b968826d9c46dd6066d109eabc6255188de91218"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-8B", ModelName("Qwen/Qwen3-8B")),
        ("a/b@main", ModelName("a/b")),
        ("a_1/b.c-d@v1.0", ModelName("a_1/b.c-d", "v1.0")),
        ("a/b@refs/pr/4", ModelName("a/b", "refs/pr/4")),
        (f"a/b@{COMMIT}", ModelName("a/b", COMMIT)),
        ("a/b:Q4_K_M", ModelName("a/b", quant="Q4_K_M")),
        ("a/b:UD-Q4_K_XL@v1", ModelName("a/b", "v1", "UD-Q4_K_XL")),
        *(
            (text, None)
            for text in (
                *("gpt2", "a/b/c", "a/", "/a", "a/b@", "a/b@/x", "a/b@../x", "a/b:", "a b/c"),
                *("a/b@v1:Q4", "a/b:Q4:Q8", "a/b:../Q4", "a/b:Q/4", f"a/b:{'Q' * 65}"),
                *("./a/b", "~/a", "../b", ".a/b", "a/..", "a/b--c", "a/b..c", "a/-b", "a/b.git"),
                *("https://huggingface.co/a/b", f"a/{'b' * 95}", "ä/b", "a/b\n", ""),
            )
        ),
    ],
)
def test_what_is_a_name(text: str, name: ModelName | None) -> None:
    assert parse_name(text) == name
    assert model_place(text) == (name or Path(text))
    if name is not None:
        assert parse_name(str(name)) == name


def test_what_exists_here_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert model_place("org/model") == ModelName("org/model")
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert model_place("org/model") == Path("org/model")


@given(st.text(alphabet="ab/.-@_~:\0 ", max_size=12))
def test_no_name_leads_out_of_the_cache(text: str) -> None:
    name = parse_name(text)
    if name is not None:
        assert ".." not in text
        assert "--" not in name.repository
        assert len(name.repository.split("/")) == 2


def test_a_snapshot_is_called_as_at_the_hub(tmp_path: Path) -> None:
    folder = tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    assert model_name_of(folder) == "Qwen/Qwen3-8B"
    assert model_name_of(folder / ".." / COMMIT) == "Qwen/Qwen3-8B"
    assert model_name_of(folder.parent) == "snapshots"
    blob = folder.parents[1] / "blobs" / "0123"
    blob.parent.mkdir()
    blob.write_bytes(b"GGUF")
    (folder / "x-Q4_K_M.gguf").symlink_to(blob)
    assert model_name_of(folder / "x-Q4_K_M.gguf") == "Qwen/Qwen3-8B"
    assert model_name_of(tmp_path / "x-Q4_K_M.gguf") == "x-Q4_K_M"


PATHS = (
    *("README.md", ".gitattributes", "config.json", "generation_config.json", "LICENSE"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "merges.txt"),
    *("vocab.json", "tokenizer.model", "chat_template.jinja", "modeling_x.py", "params.json"),
    *("additional_chat_templates/tool_use.jinja", "original/consolidated.00.pth"),
    *("original/tokenizer.model", "onnx/model.onnx", "pytorch_model.bin", "model.gguf"),
    *("additional_chat_templates/../x.jinja", "../config.json", "training_args.bin"),
)


def test_what_stands_beside_the_weights() -> None:
    assert companions(PATHS) == sorted(
        (
            *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
            *("special_tokens_map.json", "merges.txt", "vocab.json", "tokenizer.model"),
            *("chat_template.jinja", "additional_chat_templates/tool_use.jinja"),
        )
    )


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (
            ["model.safetensors", "consolidated.safetensors", "adapter_model.safetensors"],
            ["model.safetensors"],
        ),
        (
            ["model.safetensors.index.json", "a.safetensors", "b.safetensors"],
            ["model.safetensors.index.json"],
        ),
        (["x-1.safetensors", "consolidated.safetensors"], ["x-1.safetensors"]),
        (["consolidated.safetensors", "sub/x.safetensors"], ["consolidated.safetensors"]),
    ],
)
def test_which_weights(files: list[str], found: list[str]) -> None:
    assert weights("a/b", ["config.json", *files]) == found


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (
            ["config.json", "pytorch_model.bin"],
            r"a/b has no safetensors, but pickles \(pytorch_model.bin\): nothing else is read",
        ),
        (["config.json", "Q4/a.gguf"], r"no safetensors, but GGUF in folders \(Q4/a.gguf\)"),
        (["Q4/a.gguf"], r"it has no config.json, but GGUF in folders \(Q4/a.gguf\)"),
        (["config.json"], "a/b has no safetensors: nothing else is read"),
        (["config.json", "adapter_model.safetensors"], "is an adapter without its model"),
        (["model.safetensors"], "a/b is no model that can be served: it has no config.json"),
    ],
)
def test_what_is_no_model(files: list[str], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        needed_files(ModelName("a/b"), files)


SEVERAL = (
    *("x-Q4_K_M.gguf", "x-Q8_0.gguf", "x-UD-Q4_K_XL.gguf", "mmproj-x-F16.gguf", "x.imatrix.gguf"),
    *("x.F16-00001-of-00002.gguf", "x.F16-00002-of-00002.gguf", "config.json", "README.md"),
)


@pytest.mark.parametrize(
    ("quant", "found"),
    [
        ("Q4_K_M", ["x-Q4_K_M.gguf"]),
        ("q8_0", ["x-Q8_0.gguf"]),
        ("Q4_K_XL", ["x-UD-Q4_K_XL.gguf"]),
        ("UD-Q4_K_XL", ["x-UD-Q4_K_XL.gguf"]),
        ("F16", ["x.F16-00001-of-00002.gguf", "x.F16-00002-of-00002.gguf"]),
    ],
)
def test_which_of_several_models_in_gguf(quant: str, found: list[str]) -> None:
    needed = needed_files(ModelName("a/b", quant=quant), [*SEVERAL, "model.safetensors"])
    assert needed == found
    assert model_path(Path("folder"), needed) == Path("folder", found[0])


def test_a_model_by_its_importances_is_one() -> None:
    paths = ["x-imatrix-Q4_0.gguf", "x-imatrix.gguf", "imatrix_x.gguf", "x-MMPROJ-f16.gguf"]
    assert needed_files(ModelName("a/b"), paths) == paths[:1]
    assert needed_files(ModelName("a/b", quant="Q4_0"), paths) == paths[:1]


def test_one_model_in_gguf_needs_no_name_and_safetensors_go_before_it() -> None:
    assert needed_files(ModelName("a/b"), ["x-Q8_0.gguf", "README.md"]) == ["x-Q8_0.gguf"]
    both = ["x-Q8_0.gguf", "config.json", "model.safetensors"]
    needed = needed_files(ModelName("a/b"), both)
    assert needed == both[1:]
    assert model_path(Path("folder"), needed) == Path("folder")


@pytest.mark.parametrize(
    ("quant", "files", "says"),
    [
        ("", SEVERAL, "a/b has 4 models in GGUF: .* as in a/b:Q4_K_M; it has x-Q4_K_M.gguf, x-Q8"),
        ("Q5_K", SEVERAL, "a/b has no model in GGUF whose name ends with Q5_K; it has x-Q4_K_M"),
        ("Q4", ["config.json", "model.safetensors"], "a/b has no model in GGUF: leave out :Q4"),
        ("", [f"{n}.gguf" for n in range(40)], r"it has 0.gguf, .* and 28 more"),
        ("Q4", ["a-Q4.gguf", "b-Q4.gguf"], "a/b:Q4 has 2 models in GGUF"),
    ],
)
def test_which_of_several_is_not_known(quant: str, files: list[str], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        needed_files(ModelName("a/b", quant=quant), files)


def test_the_shards_of_an_index() -> None:
    table = {"x": "a-2.safetensors", "y": "a-1.safetensors", "z": "a-1.safetensors"}
    paths = ["a-1.safetensors", "a-2.safetensors", "../c.safetensors", "d/e.safetensors"]
    assert shards("a/b", {"weight_map": table}, paths) == ["a-1.safetensors", "a-2.safetensors"]
    for wrong in ("../c.safetensors", "d/e.safetensors", "f.safetensors", "code.py"):
        with pytest.raises(ConfigurationError, match="which is not there"):
            shards("a/b", {"weight_map": {"x": wrong}}, [*paths, "code.py"])
    for index in ({}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": {"x": 1}}):
        with pytest.raises(ConfigurationError, match="names no files"):
            shards("a/b", index, paths)
