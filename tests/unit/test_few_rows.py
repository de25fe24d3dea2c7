"""One row and a few take another way through a linear layer, and nothing else does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from neurogrid.model.stages import few_rows
from neurogrid.model.stages.few_rows import speed_up_few_rows


@pytest.fixture(params=["columns", "rows"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this processor is, both kinds of them."""
    monkeypatch.setattr(few_rows, "_columns_are_fast", lambda: request.param == "columns")


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the package was built without a compiler."""
    monkeypatch.setattr(few_rows, "library", lambda: None)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("width", [64, 225, 900, 3000])
def test_rows_give_what_they_gave(bias: bool, width: int) -> None:
    plain, fast = nn.Linear(width, 48, bias=bias), nn.Linear(width, 48, bias=bias)
    fast.load_state_dict(plain.state_dict())
    speed_up_few_rows(nn.Sequential(fast))
    assert isinstance(fast, nn.Linear)
    assert type(fast) is not nn.Linear
    for rows in (1, 2, 3, 4, 5, 8, 64, 65):
        x = torch.randn(rows, 1, width)
        with torch.inference_mode():
            got, expected = fast(x), plain(x)
            assert got.shape == expected.shape, rows
            assert got.is_contiguous(), rows
            assert torch.allclose(got, expected, atol=1e-4), rows
            prompt = x.transpose(0, 1)
            got, expected = fast(prompt), plain(prompt)
            assert got.shape == expected.shape, rows
            assert torch.allclose(got, expected, atol=1e-4), rows
            # A long prompt keeps its bits, and what is no sequence.
            if rows > 64:
                assert torch.equal(got, expected), rows
            assert torch.equal(fast(x[:, 0]), plain(x[:, 0])), rows


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("are_tokens", [False, True])
@pytest.mark.parametrize(
    ("rows", "filled_up"),
    [(4, 4), (5, 5), (8, 8), (9, 12), (12, 12), (61, 64), (64, 64)],
)
def test_onednn_is_asked_for_few_numbers_of_rows(
    monkeypatch: pytest.MonkeyPatch, are_tokens: bool, rows: int, filled_up: int
) -> None:
    asked: list[int] = []

    def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *args: object) -> object:
        asked.append(x.shape[0] * x.shape[1])
        return nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(few_rows, "_onednn_linear", product)
    # Too wide for columns.
    fast = nn.Linear(1100, 48)
    speed_up_few_rows(nn.Sequential(fast))
    x = torch.randn(rows, 1, 1100)
    with torch.inference_mode():
        result = fast(x.transpose(0, 1) if are_tokens else x)
    assert result.shape == ((1, rows, 48) if are_tokens else (rows, 1, 48))
    assert result.is_contiguous()
    assert asked == [filled_up]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("tokens", [5, 9, 12])
def test_a_short_prompt_may_lie_in_memory_as_it_likes_and_its_tokens_stay_apart(
    tokens: int,
) -> None:
    plain, fast = nn.Linear(96, 48), nn.Linear(96, 48)
    fast.load_state_dict(plain.state_dict())
    speed_up_few_rows(nn.Sequential(fast))
    broken = torch.randn(1, tokens, 96)
    broken[0, 2, 5] = torch.nan
    with torch.inference_mode():
        for x in (
            torch.randn(1, tokens, 200)[..., 7:103],
            torch.randn(1, 96, tokens).transpose(1, 2),
            torch.randn(1, 1, 96).expand(1, tokens, 96),
            broken,
        ):
            assert torch.allclose(fast(x), plain(x), atol=1e-4, equal_nan=True)


def test_the_torch_that_is_pinned_has_the_operator_of_onednn() -> None:
    assert torch.backends.mkldnn.is_available()
    assert few_rows._onednn_linear is not None, "torch has moved mkldnn._linear_pointwise"


@pytest.mark.parametrize("are_fast", [few_rows._columns_are_fast, few_rows._vectors_are_fast])
def test_what_is_measured_holds_for_the_process_and_draws_no_random_number(are_fast: Any) -> None:
    before = torch.get_rng_state()
    are_fast.cache_clear()
    assert are_fast() is are_fast()
    assert are_fast.cache_info().misses == 1
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("columns_are_fast", "kind"),
    [(True, few_rows._ColumnsLinear), (False, few_rows._RowsLinear)],
)
def test_what_is_measured_decides(
    monkeypatch: pytest.MonkeyPatch, columns_are_fast: bool, kind: type[nn.Linear]
) -> None:
    monkeypatch.setattr(few_rows, "_columns_are_fast", lambda: columns_are_fast)
    model = nn.Sequential(nn.Linear(64, 48))
    speed_up_few_rows(model)
    assert type(model[0]) is kind


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_where_rows_are_fast_few_of_them_keep_their_bits(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(few_rows, "_columns_are_fast", lambda: False)
    plain = nn.Linear(64, 48)
    fast = nn.Linear(64, 48)
    fast.load_state_dict(plain.state_dict())
    speed_up_few_rows(nn.Sequential(fast))
    x = torch.randn(rows, 1, 64)
    with torch.inference_mode():
        assert torch.equal(fast(x), plain(x))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("bias", [False, True])
def test_without_it_rows_give_what_they_gave(monkeypatch: pytest.MonkeyPatch, bias: bool) -> None:
    monkeypatch.setattr(few_rows, "_onednn_linear", None)
    plain, fast = nn.Linear(900, 48, bias=bias), nn.Linear(900, 48, bias=bias)
    fast.load_state_dict(plain.state_dict())
    speed_up_few_rows(nn.Sequential(fast))
    x = torch.randn(8, 1, 900)
    with torch.inference_mode():
        assert torch.equal(fast(x), plain(x))


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1,), (), (3, 1), (1, 4), (0, 1)])
def test_one_row_in_bfloat16_is_a_vector_and_gives_what_it_gave(
    monkeypatch: pytest.MonkeyPatch, bias: bool, shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr(few_rows, "_vectors_are_fast", lambda: True)
    plain, fast = (nn.Linear(96, 48, bias=bias, dtype=torch.bfloat16) for _ in range(2))
    fast.load_state_dict(plain.state_dict())
    speed_up_few_rows(nn.Sequential(fast))
    assert type(fast) is few_rows._VectorLinear
    for x in (
        torch.randn(*shape, 96, dtype=torch.bfloat16),
        torch.randn(*shape, 200, dtype=torch.bfloat16)[..., 7:199:2],
    ):
        with torch.inference_mode():
            got, expected = fast(x), plain(x)
        assert got.shape == expected.shape
        assert got.is_contiguous()
        assert torch.allclose(got, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("vectors_are_fast", [True, False])
def test_what_is_measured_decides_in_bfloat16(
    monkeypatch: pytest.MonkeyPatch, vectors_are_fast: bool
) -> None:
    monkeypatch.setattr(few_rows, "_vectors_are_fast", lambda: vectors_are_fast)
    model = nn.Sequential(nn.Linear(64, 48, dtype=torch.bfloat16))
    speed_up_few_rows(model)
    assert type(model[0]) is (few_rows._VectorLinear if vectors_are_fast else nn.Linear)


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize(
    ("dtype", "measured"),
    [
        (torch.float32, few_rows._columns_are_fast),
        (torch.bfloat16, few_rows._vectors_are_fast),
        (torch.float16, None),
    ],
)
def test_only_what_a_dtype_needs_is_measured(dtype: torch.dtype, measured: object) -> None:
    each = few_rows._columns_are_fast, few_rows._vectors_are_fast
    for one in each:
        one.cache_clear()
    few_rows.measure_few_rows(torch.device("cuda"), dtype)
    assert [one.cache_info().misses for one in each] == [0, 0]
    few_rows.measure_few_rows(torch.device("cpu"), dtype)
    assert [one.cache_info().misses for one in each] == [one is measured for one in each]


def test_float16_subclasses_and_columns_are_left_alone() -> None:
    class Own(nn.Linear):
        pass

    by_columns = nn.Linear(4, 4)
    by_columns.weight.data = torch.randn(4, 4).t()
    model = nn.Sequential(Own(4, 4), nn.Linear(4, 4).half(), by_columns)
    speed_up_few_rows(model)
    assert [type(module) for module in model] == [Own, nn.Linear, nn.Linear]
