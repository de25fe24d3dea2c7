"""Run files: what is written is what is read, and what is wrong is told in one line with its place.

More than 600 lines: each key has its wrong values in one table.
"""

from __future__ import annotations

import re
import string
import tomllib
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.errors import ConfigurationError
from neurogrid.training.averaging.aggregators import DistanceAggregator, parse_aggregator
from neurogrid.training.averaging.codecs import parse_codec
from neurogrid.training.data.preparing.tokenizing import MIN_VOCAB_SIZE
from neurogrid.training.optimizers.schedules import schedule_of
from neurogrid.training.runs.run_file import (
    DataSection,
    InnerSection,
    MembersSection,
    ModelSection,
    OuterSection,
    RunFile,
    RunFileError,
    StopSection,
    WrongValueError,
    parse_run_file,
)
from neurogrid.training.runs.run_file.mixture import MAX_REPEAT, MixturePart
from neurogrid.training.runs.run_file.places import key_lines
from neurogrid.training.runs.run_file.presets import PRESETS
from neurogrid.training.runs.run_file.run_file import SECTIONS
from neurogrid.training.runs.run_file.sections import METHODS
from neurogrid.training.runs.run_file.stage_sections import LayoutSection
from neurogrid.training.runs.run_file.values import MAX_WHOLE
from neurogrid.training.wire import GroupSettings

LEAST = """
[model]
config = "embedded"

[data]
path = "data/"

[stop]
steps = 300
"""
LEAST_RUN = parse_run_file(LEAST)


A, B = '{ path = "a/", weight = 3 }', '{ path = "b/", weight = 0.5 }'


def mixed(parts: str) -> str:
    return LEAST.replace('path = "data/"', f"mixture = [{parts}]")


def refused(text: str, *, name: str = "run.toml") -> str:
    with pytest.raises(RunFileError) as failed:
        parse_run_file(text, name=name)
    told = str(failed.value)
    assert told.isprintable(), "one line"
    assert len(told) < 500
    return told


def test_the_least_has_every_default() -> None:
    assert LEAST_RUN.name == "run"
    assert LEAST_RUN.stop == StopSection(steps=300)
    assert (LEAST_RUN.inner, LEAST_RUN.outer) == (InnerSection(), OuterSection())
    assert (LEAST_RUN.seed, LEAST_RUN.preset, LEAST_RUN.track.to) == (0, "", ())
    assert LEAST_RUN.num_batch_samples == 16
    with pytest.raises(FrozenInstanceError):
        LEAST_RUN.name = "other"  # type: ignore[misc]


def test_a_mixture_is_written_in_one_line_or_as_tables() -> None:
    data = parse_run_file(mixed(f"\n{A},\n{B},\n")).data
    assert (data.path, data.places) == ("", ("a/", "b/"))
    assert data.mixture == (MixturePart("a/", 3), MixturePart("b/", 0.5))
    tables = (f"[[data.mixture]]\n{each.replace(',', chr(10)).strip('{}')}" for each in (A, B))
    again = LEAST.replace('path = "data/"', "\n".join(tables))
    assert parse_run_file(again).data == data


def test_a_vocabulary_is_as_small_as_a_tokenizer_can_be() -> None:
    fits, too_small = (
        LEAST.replace('"data/"', f'"data/"\nvocab_size = {MIN_VOCAB_SIZE - less}')
        for less in (0, 1)
    )
    assert parse_run_file(fits).data.vocab_size == MIN_VOCAB_SIZE
    assert f"vocab_size is a whole number from {MIN_VOCAB_SIZE} to" in refused(too_small)


def test_the_text_has_all_keys() -> None:
    table = tomllib.loads(LEAST_RUN.text())
    for title, section in SECTIONS.items():
        written = table[title].keys() | set(re.findall(r"^# (\w+): ", LEAST_RUN.text(), re.M))
        assert section.keys.keys() <= written, title
        assert [each.name for each in fields(section)] == list(section.keys)  # type: ignore[arg-type]
    assert "# price: not given; a number from 0 to 10^9\n" in LEAST_RUN.text()


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("run.toml", "run"),
        ("/a/b/tiny-model.v2.toml", "tiny-model.v2"),
        ("my first run.toml", "my-first-run"),
        ("...", "run"),
        ("é.toml", "run"),
    ],
)
def test_a_run_is_called_like_its_file(file: str, name: str) -> None:
    assert parse_run_file(LEAST, name=file).name == name
    assert parse_run_file(f'name = "x"\n{LEAST}', name=file).name == "x"


def numbers(least: float, most: float, **how: Any) -> st.SearchStrategy[float]:
    return st.floats(least, most, allow_nan=False, **how)


LINES = st.text(st.characters(codec="utf-8"), max_size=30).filter(str.isprintable)
WORDS = st.text(string.ascii_letters + string.digits + "-_", min_size=1, max_size=20)
COUNTS = st.integers(1, MAX_WHOLE)


@st.composite
def data_sections(draw: st.DrawFn) -> DataSection:
    paths = draw(st.lists(LINES.filter(bool), min_size=1, max_size=5, unique=True))
    told: dict[str, Any] = {
        "tokenizer": draw(LINES),
        "token_bytes": draw(st.sampled_from([0, 2, 4])),
    }
    if len(paths) == 1:
        return replace(LEAST_RUN.data, path=paths[0], **told)
    weights = numbers(0, 10**6, exclude_min=True)
    parts = tuple(MixturePart(path.replace("://", ":"), draw(weights)) for path in paths)
    if len({part.path for part in parts}) < len(parts):
        return LEAST_RUN.data
    return DataSection(mixture=parts, repeat=draw(st.integers(1, MAX_REPEAT)), **told)


@st.composite
def run_files(draw: st.DrawFn) -> RunFile:
    """Any run file that there can be, with values from all over their ranges."""
    optimizer = draw(st.sampled_from(["adamw", "sgd"]))
    schedule = draw(st.sampled_from(["cosine", "linear", "constant", "wsd"]))
    inner = InnerSection(
        optimizer=optimizer,
        lr=draw(numbers(0, 1000, exclude_min=True)),
        betas=draw(st.tuples(*[numbers(0, 1, exclude_max=True)] * 2)),
        eps=draw(numbers(0, 1, exclude_min=True)),
        momentum=draw(numbers(0, 0.99)) if optimizer == "sgd" else 0.0,
        schedule=schedule,
        warmup=draw(st.integers(1, 10**6) | numbers(0, 0.5)),
        decay=draw(st.integers(1, 10**6) | numbers(0, 0.5, exclude_min=True))
        if schedule == "wsd"
        else 0.0,
        batch_tokens=draw(st.integers(4096, 10**9)),
        precision=draw(st.sampled_from(["float32", "bfloat16"])),
    )
    every = draw(st.integers(1, 10**6))
    method = draw(st.sampled_from(list(METHODS)))
    is_each_step = method in ("data_parallel", "distro")
    chosen: dict[str, Any] = {} if is_each_step else {"every": every}
    if method == "streaming":
        chosen |= {
            "fragments": draw(st.integers(1, min(every, 65_536))),
        }
    if method in ("streaming", "diloco"):
        chosen |= {"lr": draw(numbers(0.01, 100)), "momentum": draw(numbers(0, 0.99))}
    outer = OuterSection.of(
        method,
        **chosen,
        codec=draw(st.sampled_from(["f32", "int4", "topk:64"])),
        projected=draw(st.booleans()),
        grace=draw(numbers(0.001, 1e5)),
    )
    largest = 128 if method == "distro" else 1023
    least, most = sorted(draw(st.tuples(st.integers(1, largest), st.integers(1, largest))))
    stop = draw(
        st.builds(
            StopSection,
            tokens=st.none() | COUNTS,
            steps=COUNTS,
            rounds=st.none() | COUNTS,
            hours=st.none() | numbers(0.01, 1e9),
        )
    )
    return RunFile(
        name=draw(WORDS.filter(lambda word: word[0].isalnum())),
        model=ModelSection(draw(LINES.filter(bool))),
        data=draw(data_sections()),
        stop=stop,
        preset=draw(st.sampled_from(["", *PRESETS])),
        seed=draw(st.integers(0, MAX_WHOLE)),
        inner=inner,
        outer=outer,
        members=MembersSection(
            min=least, max=most, memory=draw(COUNTS), price=draw(st.none() | numbers(0, 1e9))
        ),
        track=replace(LEAST_RUN.track, to=draw(st.sampled_from([(), ("aim",), ("wandb", "aim")]))),
    )


@given(run_files())
def test_what_is_written_is_what_is_read(run: RunFile) -> None:
    assert parse_run_file(run.text(), name="another.toml") == run
    assert parse_run_file(run.text().replace("\n", "\r\n")) == run


def every_key() -> Iterator[tuple[str, str]]:
    for key in RunFile.keys:
        yield "", key
    for title, section in SECTIONS.items():
        for key in section.keys:
            yield title, key


# A value of another type than the key has, or outside of what is allowed, for every key.
WRONG = {
    "a date": "1979-05-27",
    "a table": "{a = 1}",
    "a negative number": "-1",
    "a number that is none": "nan",
    "a boolean or a number in its place": None,
    "a string with a line break": '"a\\nb"',
    "a nested array": "[[1]]",
    "a huge number": "1" + "0" * 4000,
}


@pytest.mark.parametrize(("title", "key"), list(every_key()))
def test_every_key_is_checked_and_told_by_its_line(title: str, key: str) -> None:
    kind = (SECTIONS[title] if title else RunFile).keys[key]
    lines = LEAST_RUN.text().splitlines()
    begin = lines.index(f"[{title}]") + 1 if title else 0
    place = next(
        (
            number
            for number, line in enumerate(lines[begin:], begin)
            if re.match(rf"(# {key}: |{key} = )", line)
        ),
        begin,
    )
    if not re.match(rf"(# {key}: |{key} = )", lines[place]):
        lines.insert(place, "")  # the preset, which is left out where there is none
    called = f"[{title}] {key}" if title else key
    for wrong, written in WRONG.items():
        value = written or ("1" if kind.says == "true or false" else "true")
        lines[place] = f"{key} = {value}"
        told = refused("\n".join(lines))
        assert told.startswith(f"run.toml:{place + 1}: {called} is {kind.says}, not ") or (
            key == "preset" and told.startswith(f"run.toml:{place + 1}: preset is ")
        ), wrong


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"{LEAST}[inner]\nlrr = 1", 'run.toml:11: [inner] has no key "lrr": there are lr, '),
        (f"{LEAST}[iner]\nlr = 1", 'run.toml:10: a run file has no "iner": there are inner, '),
        (f"shape = 1\n{LEAST}", 'run.toml:1: a run file has no "shape": there are '),
        (f'inner = "x"\n{LEAST}', 'run.toml:1: inner is a section, [inner], not "x"'),
        ("", 'run.toml:1: [model] config is needed: "embedded", '),
        ("\n\n[model]\n", "run.toml:3: [model] config is needed: "),
        (LEAST.replace("steps = 300", ""), "run.toml:8: [stop] needs one of tokens, steps, "),
        (f'{LEAST}\n[inner]\n# why\nlr =\\\n  "fast"', "run.toml:13: this is no TOML: "),
        (f'{LEAST}\n[inner]\n\n"lr" = "fast"', "run.toml:13: [inner] lr is a number above 0 and "),
        (f'inner.lr = "fast"\n{LEAST}', "run.toml:1: [inner] lr is a number above 0 and "),
        (f"\ninner = {{lr = 'fast'}}\n{LEAST}", "run.toml:2: [inner] lr is a number above 0 and "),
        (f"{LEAST}[inner]\nbetas = [\n  0.9,\n  1.5,\n]", "run.toml:11: [inner] betas is two "),
        (f"{LEAST}[inner]\nlr = 1\nlr = 2", "run.toml:12: this is no TOML: Cannot overwrite"),
        ('[model]\nconfig = "', "run.toml:2: this is no TOML: "),
        (f"{LEAST}[inner]\nbetas = {'[' * 300}{']' * 300}", "run.toml:11: [inner] betas is two "),
        (f"{LEAST}[inner]\nbetas = [\n{'1,' * 7}\n", "run.toml:12: this is no TOML: "),
        (
            f"{LEAST}[inner]\neps = 1\nbetas = [\n" + "1,\n" * 900 + "]",
            "run.toml:12: [inner] betas",
        ),
        (f"{LEAST}[inner{'.a' * 3000}]", 'run.toml:10: [inner] has no key "a": there are '),
        (f"{LEAST}inner{'.a' * 3000} = 1", 'run.toml:10: [stop] has no key "inner": there are '),
        ("x = " + "[" * 5000, "run.toml: nothing in a run file is nested so deeply"),
        ("\n" * 1001, "run.toml: 1001 bytes in 1002 lines are no run file"),
        ("#" * 20_000, "run.toml: 20000 bytes in 1 lines are no run file"),
        (LEAST.replace('path = "data/"', ""), "run.toml:5: [data] path is needed: a directory, "),
        (LEAST.replace('"data/"', '"a"\nrepeat = 2'), "run.toml:7: [data] repeat is of a mixture"),
        (
            LEAST.replace('"data/"', '"a"\ntoken_bytes = 3'),
            "run.toml:7: [data] token_bytes is 0, 2 or 4, not 3",
        ),
        (
            LEAST.replace('"data/"', f'"a"\nmixture = [{A}, {B}]'),
            "run.toml:6: [data] path is one place, and mixture several: give one of them",
        ),
        (mixed(A), 'run.toml:6: [data] mixture is an array of 2 to 64 parts, each as { path = "a/'),
        (mixed(f"{A}, 3"), "run.toml:6: [data] mixture is an array of 2 to 64 parts, each as "),
        (
            mixed(f"{A},\n\n{{ path = 'b' }}"),
            "run.toml:6: [data] mixture has no weight in part 2: ",
        ),
        (
            mixed(f"{A}, {{ weight = 1 }}"),
            "run.toml:6: [data] mixture has no path in part 2: it is",
        ),
        (mixed(f"{B}, {A}, {B}"), 'run.toml:6: [data] mixture has "b/" twice: give it the sum'),
        (
            mixed("{ path = 'a', wieght = 3 }, " + A),
            'run.toml:6: [data] mixture has "wieght" in part 1: each has path and weight',
        ),
        (
            mixed(f"{A}, {{ path = 'b', weight = 0 }}"),
            "run.toml:6: [data] mixture has weight 0 in part 2: it is a number above 0 and at most",
        ),
        (
            mixed(f"{A}, {{ path = 'https://b/c', weight = 1 }}"),
            'run.toml:6: [data] mixture is of places here, not "https://b/c": what was mixed may ',
        ),
        (f"{LEAST}[inner]\nmomentum = 0.9", 'run.toml:11: [inner] momentum is of "sgd": 0 with '),
        (f'{LEAST}[inner]\nschedule = "wsd"', "run.toml:11: [inner] decay is above 0 with "),
        (f"{LEAST}[inner]\ndecay = 0.2", 'run.toml:11: [inner] decay is of schedule "wsd": 0'),
        (
            f'{LEAST}[inner]\nschedule = "wsd"\nwarmup = 0.6\ndecay = 0.5',
            "run.toml:13: [inner] decay and warmup are shares of one run: ",
        ),
        (f"{LEAST}[outer]\nevery = 3", "run.toml:11: [outer] fragments is at most every, 3"),
        (
            f'{LEAST}[outer]\nmethod = "data_parallel"\nevery = 2',
            'run.toml:12: [outer] every is 1 with method "data_parallel"',
        ),
        (
            f'{LEAST}[outer]\nmethod = "averaging"\nlr = 0.7',
            'run.toml:12: [outer] lr is 1 with method "averaging"',
        ),
        (
            f"{LEAST}[outer]\nquorum = 65",
            "run.toml:11: [outer] quorum is at most [members] max, 64",
        ),
        (
            f'{LEAST}[outer]\nmethod = "diloco"\noverlap = true',
            'run.toml:12: [outer] overlap is of method "streaming" with at least 2 fragments',
        ),
        (f"{LEAST}[members]\nmax = 2\nmin = 3", "run.toml:12: [members] min is at most max, 2"),
        (
            f"{LEAST}[layout]\nstages = 3\n[members]\nmax = 2",
            "run.toml:11: [layout] stages is at most [members] max, 2",
        ),
        (
            LEAST.replace('"data/"', '"data/"\nsequence_length = 8192'),
            "run.toml:7: [inner] batch_tokens is at least [data] sequence_length, 8192",
        ),
        (
            LEAST.replace("steps", "tokens").replace(
                '"embedded"', '"a"\nkind = "image-classification"'
            ),
            "run.toml:10: [stop] tokens is of text: ",
        ),
        (
            LEAST.replace("steps = 300", "hours = 2"),
            'run.toml:9: [stop] hours alone says nothing of how many steps schedule "cosine" has',
        ),
        (
            f"{LEAST}[layout]\nsubspace = 64",
            "run.toml:11: [layout] subspace is for hidden states between stages: give stages, too",
        ),
        (
            f"{LEAST}[layout]\nstages = 2\nsubspace = 64\n[adapter]\nr = 8",
            "run.toml:12: [layout] subspace is for models whose own weights learn from the beginning",
        ),
        (
            f"{LEAST}[layout]\nstages = 2\npower_sgd = 4",
            "run.toml:12: [layout] power_sgd is for stages of several members: give stage_members, too",
        ),
        (
            f'{LEAST}[layout]\nstage_members = 2\npower_sgd = 4\ngradients = "bfloat16"',
            "run.toml:12: [layout] power_sgd sends what it sends in float32",
        ),
        (
            f'{LEAST}[layout]\nstages = 2\n[outer]\nmethod = "distro"',
            'run.toml:13: [outer] method "distro" is of members that hold the whole model',
        ),
        (
            f'{LEAST}[outer]\nmethod = "distro"\n[members]\nmax = 129',
            'run.toml:13: [members] max is at most 128 with method "distro"',
        ),
        (
            f'{LEAST}[outer]\nmethod = "distro"\n[epochs]\nbatches = 3\n[members]\nmin = 4',
            "run.toml:13: [epochs] batches is 0, or at least [members] min, 4",
        ),
        (
            f'{LEAST}[outer]\nmethod = "distro"\nevery = 2',
            'run.toml:12: [outer] every is 1 with method "distro"',
        ),
        (
            f"{LEAST}[epochs]\ntrain = 0",
            "run.toml:11: [epochs] train is a number of seconds, above 0 and at most 604800",
        ),
        (
            f'preset = "other"\n{LEAST}',
            'run.toml:1: preset is "hypha", "node0", "psyche", "neuroshard", not another',
        ),
    ],
)
def test_what_is_wrong_is_told_with_its_place(text: str, told: str) -> None:
    assert refused(text).startswith(told), refused(text)


@given(st.text(max_size=60) | st.text(alphabet="[]{}=.\"'\n#,x1e-_", max_size=40))
def test_no_text_is_more_than_refused(text: str) -> None:
    assert refused(text, name="a.toml").startswith("a.toml:")


@given(run_files(), st.data())
def test_a_text_that_is_cut_or_changed_is_read_or_refused(
    run: RunFile, data: st.DataObject
) -> None:
    text = run.text()
    place = data.draw(st.integers(0, len(text)))
    changed = text[:place] + data.draw(st.sampled_from(["", "\n", "1", "=", '"', "[x]\n"]))
    for other in (changed, changed + text[place + 1 :]):
        try:
            parse_run_file(other)
        except RunFileError as exc:
            assert re.match(r"run\.toml:\d+: ", str(exc))  # noqa: PT017


def test_the_lines_of_keys() -> None:
    text = """# about
a = 1
"b.c" = '''
x = 1
'''
d.e = 2

[f.g]   # more
h = [
  {i = 1},  # x = 2
]
[[j]]
k = 1
[[j]]
k = 2
"""
    assert key_lines(text) == {
        ("a",): 2,
        ("b.c",): 3,
        ("d",): 6,
        ("d", "e"): 6,
        ("f",): 8,
        ("f", "g"): 8,
        ("f", "g", "h"): 9,
        ("f", "g", "h", "i"): 9,
        ("j",): 12,
        ("j", "k"): 13,
    }


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_a_run_file_and_what_is_given_wins(preset: str) -> None:
    run = parse_run_file(f'preset = "{preset}"\n{LEAST}')
    assert run.preset == preset
    for title, values in PRESETS[preset].items():
        assert {key: getattr(getattr(run, title), key) for key in values} == values
    own = parse_run_file(f'preset = "{preset}"\n{LEAST}[outer]\ncodec = "int4"\n')
    assert own == replace(run, outer=replace(run.outer, codec="int4"))


def test_a_method_has_defaults_of_its_own() -> None:
    for method in METHODS:
        run = parse_run_file(f'{LEAST}[outer]\nmethod = "{method}"\n')
        assert run.outer == OuterSection.of(method)
    assert OuterSection() == OuterSection.of("streaming")
    assert OuterSection.of("data_parallel").every == 1
    with pytest.raises(WrongValueError, match="method is"):
        OuterSection.of("magic")


@pytest.mark.parametrize(
    ("text", "size"),
    [("7", 7), ('"8GiB"', 8 << 30), ('"1.5 kB"', 1500), ('"2MiB"', 2 << 20), ('"64"', 64)],
)
def test_sizes_have_units(text: str, size: int) -> None:
    assert parse_run_file(f"{LEAST}[members]\nmemory = {text}\n").members.memory == size


@pytest.mark.parametrize(
    "text", ['"8 potatoes"', '"-1GiB"', '"GiB"', '"1e3"', "1.5", '"9999999TB"']
)
def test_what_is_no_size(text: str) -> None:
    assert "[members] storage is bytes, " in refused(f"{LEAST}[members]\nstorage = {text}\n")


def is_taken(key: str, value: str) -> bool:
    try:
        OuterSection(**{key: value})
    except ConfigurationError:
        return False
    return True


NAMES = ["f32", "f16", "bf16", "int8", "int4", "sign", "topk", "topk:1", "topk:4096", "mean"]
NAMES += ["topk:0", "topk:4097", "topk:5000", "topk:999", "topk:1000", "topk:4089", "topk:01"]
NAMES += ["median", "trimmed_mean", "trimmed_mean:0", "trimmed_mean:0.25", "trimmed_mean:0.4999"]
NAMES += ["trimmed_mean:0.5", "mean_of_signs", "krum", "multi_krum:2", "geometric_median", ""]


@pytest.mark.parametrize("name", NAMES)
def test_names_are_those_that_averaging_has(name: str) -> None:
    """The names are said twice, as this room loads no torch."""

    def known_codec() -> bool:
        try:
            return bool(parse_codec(name))
        except ConfigurationError:
            return False

    def known_aggregator() -> bool:
        try:  # a group has none that needs whole vectors
            return not isinstance(parse_aggregator(name), DistanceAggregator)
        except ConfigurationError:
            return False

    assert is_taken("codec", name) == known_codec()
    assert is_taken("aggregator", name) == known_aggregator()


@pytest.mark.parametrize("way", ["butterfly", "server", "everybody", "grid"])
def test_what_is_said_of_a_group_is_what_a_group_takes(way: str) -> None:
    outer = OuterSection(way=way, grace=0.001, attempt_timeout=1, quorum=1023)
    settings = GroupSettings(
        1,
        outer.quorum,
        outer.grace,
        outer.attempt_timeout,
        outer.codec,
        aggregator=outer.aggregator,
        way=outer.way,
    )
    assert GroupSettings.decode(settings.encode()) == settings


@given(
    st.sampled_from(["cosine", "linear", "constant", "wsd"]),
    st.integers(2, 10**6),
    st.integers(1, 10**6) | numbers(0, 0.5),
    st.integers(1, 10**6) | numbers(0, 0.5, exclude_min=True),
)
def test_warm_up_and_decay_fit_into_any_run(
    schedule: str, num_steps: int, warmup: float, decay: float
) -> None:
    inner = InnerSection(
        schedule=schedule, warmup=warmup, decay=decay if schedule == "wsd" else 0.0
    )
    up, down = inner.warmup_steps(num_steps), inner.decay_steps(num_steps)
    assert 0 <= up <= num_steps
    assert 0 <= down <= num_steps - up
    assert up == (min(num_steps, int(warmup)) if warmup >= 1 else up)
    if schedule != "wsd":
        assert down == 0


def test_the_schedules_are_those_that_there_are() -> None:
    names = {"wsd": "warmup_stable_decay"}
    for name in ("cosine", "linear", "constant", "wsd"):
        inner = InnerSection(schedule=name, decay=0.2 if name == "wsd" else 0.0)
        factor = schedule_of(
            names.get(name, name),
            num_steps=100,
            num_warmup_steps=inner.warmup_steps(100),
            num_decay_steps=inner.decay_steps(100),
        )
        assert factor(0) == 0.0
        assert factor(5) == 1.0


def test_what_members_lend_counts_by_tiers() -> None:
    """500 MB, as NeuroShard has them: a little more or less memory gives the same cut."""
    layout = LayoutSection(memory_tier=500)
    assert layout.tiered(6_568_000_000) == layout.tiered(6_622_000_000) == 6_500_000_000
    assert layout.tiered(0) == 0  # any
    assert layout.tiered(1) == 1  # and not any
    assert LayoutSection().tiered(6_568_000_001) == 6_568_000_001


def test_a_chain_of_so_many_members_has_four_micro_batches_for_each() -> None:
    layout = LayoutSection(stages=2)
    assert (layout.num_micro_batches(100), layout.num_micro_batches(100, 5)) == (8, 20)
    assert layout.num_micro_batches(3, 5) == 3
    assert replace(layout, micro_batches=7).num_micro_batches(100, 5) == 7


REPLICAS = LEAST + '[outer]\nmethod = "diloco"\n[layout]\nreplicas = 3\nstages = 2\n'


def test_replicas_are_chains_that_average() -> None:
    run = parse_run_file(REPLICAS)
    assert run.is_chain
    assert parse_run_file(REPLICAS.replace("stages = 2", "stages = 1")).is_chain
    assert parse_run_file(run.text()) == run


@pytest.mark.parametrize(
    ("given", "wanted", "told"),
    [
        ('"diloco"', '"averaging"', 'method is "diloco" where [layout] replicas is above 1'),
        ('"diloco"', '"diloco"\nway = "server"', 'way is "butterfly" where'),
        ('"diloco"', '"diloco"\naggregator = "median"', 'aggregator is "mean" where'),
        ('"diloco"', '"diloco"\ncodec = "topk:64"', '"sign" and "topk" are not for'),
        ('"diloco"', '"diloco"\nquorum = 4', "quorum is at most [layout] replicas, 3"),
        ("[layout]", "[members]\nmin = 4\n[layout]", "min is at most [layout] replicas, 3"),
        ("stages = 2", "stages = 2\nstage_members = 2", "stage_members is 1 with them"),
        ("stages = 2", "stages = 2\nsubspace = 8", "replicas have no subspace"),
        ("= 3\nstages = 2", "= 64\nstages = 8", "of 8 stages are at most 32"),
    ],
)
def test_what_replicas_cannot_do_is_said(given: str, wanted: str, told: str) -> None:
    assert told in refused(REPLICAS.replace(given, wanted))
