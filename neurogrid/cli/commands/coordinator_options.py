"""The options of a coordinator, in groups: `neurogrid-coordinator` has all, commands of `neurogrid` some of them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from neurogrid.cli.commands.diagnose import DIAGNOSE_WAIT
from neurogrid.cli.commands.serve import SERVING_SESSIONS
from neurogrid.cli.options.common import positive_float, positive_int, whole_number
from neurogrid.cli.options.discovery import peer_address
from neurogrid.cli.options.model import (
    HUB_NAMES,
    adapter_place,
    add_offline_option,
    model_place,
)

__all__ = [
    "MAX_ANSWER_TOKENS",
    "MAX_TOKENS",
    "CLUSTER_WAIT",
    "WAIT",
    "add_generation_options",
    "add_model_options",
    "add_prompt_options",
    "add_question_options",
    "add_worker_options",
]

MAX_TOKENS: Final = 128
MAX_ANSWER_TOKENS: Final = 1024
# Seconds to wait for workers: they may still be importing torch.
WAIT: Final = 60.0
# The same where a cluster is served: somebody carries a ticket to each of them.
CLUSTER_WAIT: Final = 1800.0


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the model: which it is, and how much it is to hold."""
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", type=model_place, metavar="MODEL", help=f"the checkpoint: {HUB_NAMES}"
    )
    add_offline_option(model)
    model.add_argument(
        "--model-name",
        metavar="NAME",
        help="what to call it (default: as its directory, or as at the hub)",
    )
    model.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="to compute in (default: the checkpoint's)",
    )
    model.add_argument(
        "--quantize",
        choices=("int8", "int4"),
        help="let the layers' matrices travel, and be held, in 8.5 or 4.5 bits a weight; int8 changes next to nothing, "
        "int4 a little",
    )
    model.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "int8"),
        default="auto",
        help="what workers keep the keys and values of sessions as: auto, what is computed in; int8, 8.5 bits a "
        "number, so that sessions are nearly twice as long, or as many, as in bfloat16 (default %(default)s)",
    )
    model.add_argument(
        "--adapter",
        action="append",
        type=adapter_place,
        default=[],
        metavar="[NAME=]DIR",
        help="a LoRA adapter beside the model, as PEFT or a training run wrote it: answer with it, or serve it as "
        "a model of its name (default: as its directory, or its run); to serve several, given again",
    )
    model.add_argument(
        "--max-seq-len",
        type=positive_int,
        default=4096,
        metavar="N",
        help="tokens of the longest session (default %(default)s, or the model's bound if less)",
    )
    model.add_argument(
        "--max-sessions",
        type=positive_int,
        metavar="N",
        help="sessions of --max-seq-len tokens that workers set memory aside for; shorter ones share it, so that "
        f"more run at once (default {SERVING_SESSIONS}; 1 for a --prompt)",
    )
    model.add_argument(
        "--no-prefix-reuse",
        dest="prefix_reuse",
        action="store_false",
        help="compute every prompt whole; otherwise what it shares with a finished session is not computed again, "
        "and the time to the first token tells whether somebody asked the same before",
    )
    model.add_argument(
        "--speculate",
        choices=("auto", "lookup", "off"),
        default="auto",
        help="propose tokens by what followed the last ones earlier in the text, and have the model look at several "
        "in a pass: text that is edited or quoted comes faster, and no token is another. lookup: also where a tie in "
        "half precision could fall otherwise; off: never (default %(default)s)",
    )
    model.add_argument(
        "--draft",
        type=Path,
        metavar="DIR",
        help="the checkpoint directory of a small model with the same tokenizer: this process has it whole, and it "
        "proposes tokens where the text does not repeat itself",
    )


def add_worker_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of workers, and of how the layers lie on them."""
    workers = parser.add_argument_group("workers")
    workers.add_argument(
        "--peer",
        action="append",
        type=peer_address,
        default=[],
        metavar="MULTIADDR",
        help="a worker to dial, as it printed its address; may be given again",
    )
    workers.add_argument(
        "--local-workers",
        type=positive_int,
        default=0,
        metavar="N",
        help="start N workers on this machine; they share its memory, each gets a stage "
        "(default %(default)s)",
    )
    workers.add_argument(
        "--threads",
        type=positive_int,
        metavar="N",
        help="compute on the CPU with N threads, of which local workers get equal parts (default: OMP_NUM_THREADS, "
        "or one for each core)",
    )
    workers.add_argument(
        "--local-layers",
        type=_local_layers,
        default="auto",
        metavar="auto|none|N",
        help="layers that this machine computes itself: exactly N, the first; auto: as many as it takes where the "
        "workers cannot hold the model, or where a GPU here makes it much faster (default %(default)s)",
    )
    workers.add_argument(
        "--min-peers",
        type=whole_number,
        metavar="N",
        help="workers to wait for, this machine not counted (default: as many as are named and started, or one that is "
        "found); 0 to compute here until some come",
    )
    workers.add_argument(
        "--wait",
        type=positive_float,
        metavar="SECONDS",
        help=f"how long to wait for them (default {WAIT:g}; to serve a cluster {CLUSTER_WAIT:g}; to --diagnose "
        f"{DIAGNOSE_WAIT:g})",
    )
    workers.add_argument(
        "--stages",
        type=positive_int,
        metavar="N",
        help="that many stages (default: fewest that fit)",
    )
    workers.add_argument(
        "--routing",
        choices=("chain", "star"),
        default="chain",
        help="chain: each worker hands on to the next, unless it cannot reach it; star: every activation "
        "comes back here in between (default %(default)s)",
    )
    workers.add_argument(
        "--wire-dtype",
        choices=("float32", "float16", "bfloat16", "int8"),
        help="in which activations travel between the stages; int8 is off by up to 1/254 of the largest of 64 "
        "neighbours (default: what is computed in, which loses nothing)",
    )
    workers.add_argument(
        "--no-replicas",
        action="store_true",
        help="send nothing to workers that are left over: they stand by without layers",
    )
    workers.add_argument(
        "--verify",
        type=_share,
        default=0.0,
        metavar="P",
        help="have a share of the sessions, as 0.05 or 5%%, computed again when they are over: by another worker that "
        "holds the same layers, or by this machine; one that computed wrong is named and excluded (default "
        "%(default)g)",
    )
    workers.add_argument(
        "--patience",
        type=positive_float,
        default=120.0,
        metavar="SECONDS",
        help="how long a generation waits for a way around a worker that failed, or for one that has no room "
        "(default %(default)g)",
    )
    workers.add_argument(
        "--skip-weight-transfer",
        action="store_true",
        help="send no weights: workers must hold this model's layers already",
    )
    workers.add_argument(
        "--peer-vram-gb",
        type=positive_float,
        default=8.0,
        metavar="G",
        help="GiB assumed for workers that do not tell their memory (default %(default)g)",
    )


def add_question_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of questions, which are answered in place of serving."""
    group = parser.add_argument_group("questions", "answered without sending anything")
    group.add_argument(
        "--diagnose",
        action="store_true",
        help="look for workers, print what was tried and what came of it, and end",
    )
    group.add_argument(
        "--plan-only",
        action="store_true",
        help="wait for the workers, print which layers each would hold and how fast that would be, and end",
    )


def add_prompt_options(parser: argparse.ArgumentParser, *, with_chat: bool) -> None:
    """Add the options of a text to write, after which the command ends."""
    group = parser.add_argument_group("text")
    prompt = group.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue")
    prompt.add_argument(
        "--prompt-file", metavar="FILE", help="a file with the text to continue, - for stdin"
    )
    if with_chat:
        prompt.add_argument(
            "--chat",
            action="store_true",
            help="talk to the model in the terminal; on a pipe, each line of stdin is a turn",
        )


def add_generation_options(parser: argparse.ArgumentParser, *, with_system: bool = True) -> None:
    """Add the options of generation: how a text is continued."""
    generation = parser.add_argument_group("generation")
    if with_system:
        generation.add_argument(
            "--system", metavar="TEXT", help="with --chat: what the model is told first"
        )
    generation.add_argument(
        "--max-tokens",
        type=positive_int,
        metavar="N",
        help=f"new tokens at most (default {MAX_TOKENS}; of each answer in --chat {MAX_ANSWER_TOKENS})",
    )
    generation.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0 takes the likeliest token each time (default %(default)g)",
    )
    generation.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="sample among the K likeliest; 0 for all (default %(default)s)",
    )
    generation.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample among the likeliest that make up P (default %(default)g: all)",
    )
    generation.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="sample among those with P times the probability of the likeliest (default %(default)g: all)",
    )
    generation.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="R",
        help="above 1, make less likely what the prompt and the answer have already (default %(default)g)",
    )
    generation.add_argument(
        "--seed",
        type=int,
        metavar="S",
        help="makes sampling repeatable (default: another each time)",
    )


def _local_layers(text: str) -> str | int:
    """An argparse type: `auto`, `none`, or a number of layers; 0 is none."""
    if text in ("auto", "none"):
        return text
    return whole_number(text) or "none"


def _share(text: str) -> float:
    """An argparse type: a share, as a number from 0 to 1 or in percent."""
    number, is_percent = (text[:-1], True) if text.endswith("%") else (text, False)
    try:
        value = float(number) / (100 if is_percent else 1)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} is no share: give 0.05, or 5%") from exc
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1, or 0% and 100%")
    return value
