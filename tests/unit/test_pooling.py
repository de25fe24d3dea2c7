"""How hidden states become an embedding: what the checkpoint's files say, and the arithmetic of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from neurogrid.errors import ConfigurationError, ModelError, UnsupportedModelError
from neurogrid.hub.needed import companions
from neurogrid.inference.generation.prompt_readers import PooledHidden
from neurogrid.model.files.pooling import Pooling, PoolingMode, read_pooling

MODULES = ("Transformer", "Pooling", "Normalize")


def write(folder: Path, pooling: object, kinds: tuple[str, ...] = MODULES) -> Path:
    modules = [
        {"idx": index, "path": f"{index}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for index, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def test_without_files_it_is_the_last_token(tmp_path: Path) -> None:
    assert read_pooling(tmp_path, {}) == Pooling(PoolingMode.LAST, normalises=True)
    assert read_pooling(tmp_path / "model.gguf", {}) == Pooling()


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        ({"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}, PoolingMode.LAST),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, PoolingMode.MEAN),
        ({"pooling_mode_weightedmean_tokens": True}, PoolingMode.WEIGHTED_MEAN),
        ({"pooling_mode": "cls"}, PoolingMode.FIRST),
    ],
)
def test_the_makers_say(tmp_path: Path, config: object, mode: PoolingMode) -> None:
    assert read_pooling(write(tmp_path, config), {}) == Pooling(mode, normalises=True)


def test_some_do_not_normalise(tmp_path: Path) -> None:
    path = write(tmp_path, {"pooling_mode_mean_tokens": True}, MODULES[:2])
    assert read_pooling(path, {}) == Pooling(PoolingMode.MEAN, normalises=False)


@pytest.mark.parametrize(
    ("kinds", "pooling", "config", "named"),
    [
        ((*MODULES, "Dense"), {"pooling_mode_mean_tokens": True}, {}, "Dense"),
        (
            MODULES,
            {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True},
            {},
            "2 ways",
        ),
        (MODULES, {"pooling_mode_unheard_of": True}, {}, "0 ways"),
        (MODULES, [], {}, "no object"),
        (MODULES, {"pooling_mode": "cls"}, {"is_causal": False}, "behind them"),
        (
            MODULES,
            {"pooling_mode": "cls"},
            {"text_config": {"use_bidirectional_attention": True}},
            "behind them",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, kinds: tuple[str, ...], pooling: object, config: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        read_pooling(write(tmp_path, pooling, kinds), config)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"type": "a.Pooling", "path": "../x"}]'])
def test_files_that_are_not_what_they_should_be(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(UnsupportedModelError):
        read_pooling(tmp_path, {})


def test_the_hub_is_asked_for_them() -> None:
    paths = ["modules.json", "1_Pooling/config.json", "2_Dense/config.json", "../config.json"]
    assert sorted(companions(["config.json", *paths])) == [
        "1_Pooling/config.json",
        "config.json",
        "modules.json",
    ]


class Same:
    """In place of a model's ends: what left the last layer is final."""

    def final_hidden(self, hidden_BTD: torch.Tensor, *, position: int) -> torch.Tensor:
        return hidden_BTD[0]


def pooled(
    pooling: Pooling, hidden_TD: torch.Tensor, cuts: list[tuple[int, int]], **more: Any
) -> torch.Tensor:
    reader = PooledHidden(pooling, **more)
    reader.read(Same(), hidden_TD[None, :1] * 9, 0)  # type: ignore[arg-type]
    reader.restart()
    for start, stop in cuts:
        reader.read(Same(), hidden_TD[None, start:stop], start)  # type: ignore[arg-type]
    return torch.tensor(reader.embedding())


@pytest.mark.parametrize("mode", PoolingMode)
def test_pieces_give_what_the_whole_gives(mode: PoolingMode) -> None:
    hidden_TD = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    weights_T = torch.arange(1.0, 8.0)
    expected_D = {
        PoolingMode.FIRST: hidden_TD[0],
        PoolingMode.LAST: hidden_TD[-1],
        PoolingMode.MEAN: hidden_TD.mean(0),
        PoolingMode.MAX: hidden_TD.max(0).values,
        PoolingMode.MEAN_SQRT_LENGTH: hidden_TD.sum(0) / 7**0.5,
        PoolingMode.WEIGHTED_MEAN: (weights_T / weights_T.sum()) @ hidden_TD,
    }[mode]
    for cuts in ([(0, 7)], [(3, 7), (0, 3)], [(i, i + 1) for i in range(7)]):
        got_D = pooled(Pooling(mode, normalises=False), hidden_TD, cuts)
        assert torch.allclose(got_D, expected_D, atol=1e-6)
    normed_D = pooled(Pooling(mode), hidden_TD, [(0, 7)], dimensions=3)
    assert torch.allclose(normed_D, torch.nn.functional.normalize(expected_D[:3], dim=0), atol=1e-6)


def test_numbers_that_are_none_are_an_error() -> None:
    with pytest.raises(ModelError, match="float32"):
        pooled(Pooling(), torch.full((1, 3), torch.inf), [(0, 1)])
    with pytest.raises(ConfigurationError, match="3 dimensions"):
        pooled(Pooling(), torch.ones(1, 3), [(0, 1)], dimensions=4)
