"""The command line: init, check, train, resume, eval, score, plot, doctor.

Exit codes: 0 done; 2 something that the user mends, said in one sentence on stderr; 1 a run that
failed or an error of ours; 130 interrupted. torch and Ray are imported where a model runs only.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib import resources
from pathlib import Path

import offbeat
from offbeat.config_file import check_files, load_config
from offbeat.errors import OffbeatError, UserError

STARTER = ("run.toml", "rewards.py", "train.jsonl", "validation.jsonl")

Command = Callable[[argparse.Namespace, list[str]], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings = logging.StreamHandler()
    warnings.setLevel(logging.WARNING)
    logging.basicConfig(format="offbeat: %(message)s", handlers=[warnings])
    options, overrides = _parser().parse_known_args(arguments)
    command: Command = options.command
    try:
        if overrides and options.config is None and options.name not in ("resume", "fork"):
            raise UserError(
                f"unexpected argument {overrides[0]}; see offbeat {options.name} --help"
            )
        if overrides and options.config is not None and not options.config.exists():
            raise UserError(
                f"{options.config} does not exist; settings stand behind the file: offbeat "
                f"{options.name} CONFIG {overrides[0]} ..."
            )
        return command(options, overrides)
    except KeyboardInterrupt:
        print("offbeat: interrupted", file=sys.stderr)
        return 130
    except (OffbeatError, ExceptionGroup) as error:
        known = _known(error)
        if known is None:
            traceback.print_exc()
            return 1
        print(f"offbeat: {' '.join(str(known).split())}", file=sys.stderr)
        return 2 if isinstance(known, UserError) else 1
    except Exception:  # the last line of defence: an error of ours keeps its traceback
        traceback.print_exc()
        return 1


def _known(error: Exception) -> OffbeatError | None:
    """The error of ours inside a group; None if anything unexpected is in it."""
    if isinstance(error, ExceptionGroup):
        _, unexpected = error.split(OffbeatError)
        inner = error.exceptions[0]
        return None if unexpected else _known(inner)
    return error if isinstance(error, OffbeatError) else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="offbeat",
        description=offbeat.__doc__,
        epilog="exit codes: 0 done, 2 yours to mend (one sentence), 1 failed, 130 interrupted",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"offbeat {offbeat.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, run: Command, help: str, *, config: bool = True) -> argparse.ArgumentParser:
        epilog = "any setting can follow the file: --section.key value" if config else None
        sub = commands.add_parser(
            name, help=help, description=help, epilog=epilog, allow_abbrev=False
        )
        sub.set_defaults(command=run, name=name, config=None)
        if config:
            sub.add_argument("config", type=Path, metavar="CONFIG", help="TOML file of the run")
        return sub

    init = add("init", _init, "write a starter configuration, reward and data", config=False)
    init.add_argument("folder", type=Path, metavar="DIR", help="created if missing")
    init.add_argument("--model", type=Path, help="model directory to put into the configuration")
    check = add("check", _check, "say all that a run would do, and what is wrong; starts nothing")
    check.add_argument(
        "--assume", nargs="?", const="", metavar="N or NODESxN",
        help="check for a cluster that is not here: N GPUs, or NODES nodes of N (2x8)",
    )  # fmt: skip
    add("train", _train, "check and train")
    go_on = add("resume", _resume, "go on with a run that has ended or was killed", config=False)
    go_on.add_argument("run_dir", type=Path, metavar="RUN", help="its directory, or name in runs/")
    go_on.epilog = "settings that do no harm can follow: --section.key value"
    _add_fork(add("fork", _fork, "begin another run at a checkpoint of this one", config=False))
    again = add("replay", _replay, "train from a run's own record, and compare", config=False)
    again.add_argument("run_dir", type=Path, metavar="RUN", help="its directory, or name in runs/")
    again.add_argument("--from", type=_count, dest="first", metavar="STEP", help="its checkpoint")
    again.add_argument("--out", type=Path, metavar="DIR", help="default: RUN/replay")
    evaluate = add("eval", _eval, "validation of a model directory")
    evaluate.add_argument("--model", type=Path, help="model directory; default: [model].path")
    _add_score(add("score", _score, "score a file of answers with a run's reward sources"))
    plot = add("plot", _plot, "draw a run's curves", config=False)
    plot.add_argument("run_dir", type=Path, metavar="RUN", help="a run's directory, or its name")
    plot.add_argument("-o", "--out", type=Path, required=True, help="PNG file to write")
    add("doctor", _doctor, "say what is installed, whether it fits, and the mends", config=False)
    return parser


def _add_fork(fork: argparse.ArgumentParser) -> None:
    fork.epilog = "settings that do no harm can follow: --section.key value"
    option = fork.add_argument
    option("run_dir", type=Path, metavar="RUN", help="its directory, or name in runs/")
    option("--step", type=_count, required=True, metavar="N", help="the checkpoint's")
    option("new", metavar="NEW", help="name of the new run, which lies beside RUN")
    option("--go", action="store_true", help="go on with the new run at once")


def _add_score(score: argparse.ArgumentParser) -> None:
    option = score.add_argument
    option("file", type=Path, metavar="FILE", help=".jsonl or .parquet: [data]'s columns + answers")
    option("-o", "--out", type=Path, help="file to write; default: FILE with .scored in its name")
    option("--answer-column", default="completion", metavar="C", help="default: completion")
    option("--group-column", metavar="C", help="rows on end with equal values are one prompt's")
    option("--sources", metavar="A,B", help="names of the sources to ask; default: all of the run")
    option("--into", default="reward", metavar="C", help="column of the total; default: reward")
    option("--in-flight", type=_positive, metavar="N", help="rows under way at once at most")
    option("--retry-failed", action="store_true", help="go on, and score failed rows once more")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 0 on")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1 on")
    return int(text)


def _init(options: argparse.Namespace, overrides: list[str]) -> int:
    folder: Path = options.folder
    there = [name for name in STARTER if (folder / name).exists()]
    if there:
        raise UserError(f"{folder / there[0]} exists already; choose another directory")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in STARTER:
            text = resources.files("offbeat").joinpath("templates", name).read_text("utf-8")
            if name == "run.toml" and options.model is not None:
                text = text.replace('"models/actor"', f'"{options.model.resolve().as_posix()}"')
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error}") from None
    config = folder / STARTER[0]
    if options.model is None:
        print(f"wrote {', '.join(STARTER)} to {folder}; set [model].path in {config}, then:")
    else:
        print(f"wrote {', '.join(STARTER)} to {folder}; next:")
    print(f"  offbeat check {config}\n  offbeat train {config}")
    return 0


def _check(options: argparse.Namespace, overrides: list[str]) -> int:
    from offbeat.cli_check import preflight
    from offbeat.cli_cluster import parse_assumed

    assumed = None if options.assume is None else parse_assumed(options.assume)
    config = load_config(options.config, overrides, files=assumed is None)
    absent: list[str] = []
    if assumed is not None:
        check_files(config, options.config, absent.append)
    preflight(config, print, assumed=assumed)
    for name in absent:
        print(f"not on this machine: {name}")
    print("\nready: nothing was started")
    return 0


def _train(options: argparse.Namespace, overrides: list[str]) -> int:
    from offbeat.cli_check import preflight

    config = load_config(options.config, overrides)
    preflight(config, lambda line: None, lambda line: print(f"offbeat: {line}", file=sys.stderr))
    from offbeat.cluster import launch

    return launch.train(config, sys.stdout)


def _resume(options: argparse.Namespace, overrides: list[str]) -> int:
    from offbeat.cli_resume import resume

    note = partial(print, "offbeat:", file=sys.stderr)
    return resume(options.run_dir, overrides, print, note)


def _fork(options: argparse.Namespace, overrides: list[str]) -> int:
    from offbeat.cli_fork import fork

    note = partial(print, "offbeat:", file=sys.stderr)
    chosen = options.run_dir, options.step, options.new
    return fork(*chosen, overrides, print, note, go=options.go)


def _replay(options: argparse.Namespace, overrides: list[str]) -> int:
    from offbeat.cli_replay import replay

    return replay(options.run_dir, options.first, options.out, print)


def _eval(options: argparse.Namespace, overrides: list[str]) -> int:
    from offbeat.cli_eval import evaluate

    config = load_config(options.config, overrides, files=False)
    asyncio.run(evaluate(config, options.model, print))
    return 0


def _score(options: argparse.Namespace, overrides: list[str]) -> int:
    from offbeat.cli_score import ScoreOptions, score

    chosen = ScoreOptions(
        file=options.file,
        out=options.out,
        answer_column=options.answer_column,
        group_column=options.group_column,
        sources=options.sources,
        into=options.into,
        in_flight=options.in_flight,
        retry_failed=options.retry_failed,
    )
    note = partial(print, "offbeat:", file=sys.stderr)
    return score(options.config, overrides, chosen, print, note)


def _plot(options: argparse.Namespace, overrides: list[str]) -> int:
    from offbeat.cli_resume import find_run
    from offbeat.track.plot import plot

    plot(find_run(options.run_dir), options.out)
    print(f"wrote {options.out}")
    return 0


def _doctor(options: argparse.Namespace, overrides: list[str]) -> int:
    from offbeat.cli_doctor import doctor

    return doctor(print)


if __name__ == "__main__":
    raise SystemExit(main())
