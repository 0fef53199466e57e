"""`offbeat score`: a file of answers through a run's reward sources, before there is a run.

Twice over the file: first every row is looked at, and whether the output can hold them, so that a
mistake is told before anything starts and costs; then rows are read again, scored with a bounded
number in flight, and committed to OUT.progress. At the end the output is written from the file and
the progress, and renamed into place. So a run that was killed goes on where it was, and its output
has the bytes of one that was not.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.cli_models import check_reward_model
from offbeat.cli_score_files import check_fits, check_format, fingerprint, part_of, stream, write
from offbeat.cli_score_progress import Progress
from offbeat.cli_score_rows import OUTCOME, Reading
from offbeat.cli_score_run import Scoring
from offbeat.cli_score_table import Tallies
from offbeat.config import Config, RewardSourceSection
from offbeat.config_file import check_files, check_no_passwords, load_config
from offbeat.config_reward import READY_TEMPLATES
from offbeat.errors import UserError

Say = Callable[[str], None]

HOW_ONLY = frozenset(
    {
        "workers", "retries", "deadline_seconds", "concurrency", "max_failed_share",
        "patience_seconds", "anchors", "anchors_every", "replicas", "devices_per_replica", "pool",
        "device_share", "placement", "memory_share", "threads", "seats", "api_key_env",
        "requests_per_minute", "tokens_per_minute", "cache",
    }
)  # fmt: skip
"""Settings of a source that say how it is asked and not what it answers: they may change between
a start and the next."""


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """The options of the command; see its help."""

    file: Path
    out: Path | None = None
    answer_column: str = "completion"
    group_column: str | None = None
    sources: str | None = None
    into: str = "reward"
    in_flight: int | None = None
    retry_failed: bool = False

    @property
    def output(self) -> Path:
        """Where the scored rows go."""
        default = self.file.with_name(f"{self.file.stem}.scored{self.file.suffix}")
        return default if self.out is None else self.out


def score(path: Path, overrides: Sequence[str], options: ScoreOptions, say: Say, note: Say) -> int:
    """Scores the file and says the table; `note` is told of what goes on. Returns 0.

    Raises `UserError` with the line of a row that cannot be scored; whatever else ends it leaves
    the progress to go on from.
    """
    config = load_config(path, overrides, files=False)
    chosen = choose(config, options.sources)
    check_no_passwords(chosen.active_rewards, f"{options.output}.progress")
    check_files(chosen, path, rewards_only=True)
    for name, source in chosen.active_rewards.items():
        if source.has_pool:
            check_reward_model(name, source)
    out, progress_path = _places(options)
    reading = Reading(
        config, chosen, options.file, options.answer_column, options.group_column, options.into
    )
    lines, digest = _survey(reading, out)
    progress = Progress(progress_path, facts_of(reading, digest))
    try:
        if out.exists() and not any(progress.done(len(lines))):
            raise UserError(f"{out} exists already; remove it, or choose another with -o")
        if options.retry_failed:
            note(f"{progress.forget_failed()} rows with a failure are scored again")
        scoring = Scoring(reading, progress, options.in_flight)
        scoring.run(len(lines), note)
        tallies = Tallies(list(chosen.active_rewards), options.into)
        _assemble(reading, progress, lines, digest, out, tallies)
    except BaseException:
        progress.leave()
        raise
    progress.remove()
    say(f"{tallies.text(scoring.stats, scoring.seconds)}\nwrote {out}")
    return 0


def choose(config: Config, sources: str | None) -> Config:
    """The configuration with the sources to ask, by their names with commas between.

    They are tried, not trained on. So their failures do not stall it, however many: they are what
    is to be seen. And where none of the named ones adds to a total, each does, with weight 1.
    """
    update: dict[str, Any] = {"max_failed_share": 1.0}
    names = tuple(config.active_rewards) if sources is None else _named(config, sources)
    if not any(config.reward[n].role == "add" and config.reward[n].weight for n in names):
        update |= {"role": "add", "weight": 1.0}
    tried = {name: config.reward[name].model_copy(update=update) for name in names}
    return config.model_copy(update={"use_rewards": names, "reward": {**config.reward, **tried}})


def _named(config: Config, sources: str) -> tuple[str, ...]:
    names = tuple(filter(None, (name.strip() for name in sources.split(","))))
    if not names:
        raise UserError(f"--sources names none; there are {', '.join(config.reward)}")
    for name in names:
        if name not in config.reward:
            raise UserError(
                f"--sources names {name!r}, which is no reward source; there are "
                f"{', '.join(config.reward)}"
            )
    return names


def _places(options: ScoreOptions) -> tuple[Path, Path]:
    """The output and its progress, which can be written."""
    out = options.output
    check_format(options.file, "the file")
    check_format(out, "the output")
    if not out.parent.is_dir():
        raise UserError(f"{out.parent} is no folder; choose another -o")
    try:
        if out.exists() and options.file.exists() and out.samefile(options.file):
            raise UserError(f"{out} is the file itself; choose another -o")
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}; choose another name") from None
    if part_of(out).is_dir():
        raise UserError(
            f"{part_of(out)} is a folder, and {out.name} is made under that name; remove it, or "
            "choose another -o"
        )
    progress = out.with_name(f"{out.name}.progress")
    return out, progress


def _survey(reading: Reading, out: Path) -> tuple[Sequence[int], str]:
    """The lines of all rows, which can all be scored and written, and the file's fingerprint."""
    groups = reading.groups(stream(reading.path))
    lines = array("q", (entry.line for group in groups for entry in group))
    if not lines:
        raise UserError(f"{reading.path} has no rows; give it at least one answer")
    if out.suffix == ".parquet":
        check_fits(reading.path, _fields(reading))
    return lines, fingerprint(reading.path)


def facts_of(reading: Reading, digest: str) -> dict[str, Any]:
    """All that scores follow from, as plain values."""
    chosen = reading.chosen
    sources = {
        f"reward.{name}": {
            key: value
            for key, value in section.model_dump(mode="json").items()
            if key not in HOW_ONLY
        }
        for name, section in chosen.active_rewards.items()
    }
    files = {
        str(path): _state(path)
        for section in chosen.active_rewards.values()
        for path in _files_of(section, chosen.base_dir)
    }
    return {
        **sources,
        "data": {key: value for key, value in chosen.data.model_dump().items() if "column" in key},
        "seed": chosen.seed,
        "FILE": reading.path.name,
        "content of": {str(reading.path.name): digest, **files},
        "answer-column": reading.answer_column,
        "group-column": reading.group_column,
        "into": reading.into,
    }


def _files_of(section: RewardSourceSection, base: Path) -> Iterator[Path]:
    """The files that a source's answers depend on: its code, its template, its model."""
    place = (section.function or "").rpartition(":")[0]
    if section.kind == "function" and place.endswith(".py"):
        yield base / place
    if section.template is not None and str(section.template) not in READY_TEMPLATES:
        yield section.template
    if section.has_pool and section.model is not None:
        yield Path(section.model)


def _state(path: Path) -> str:
    """A file's content, or the names, sizes and times of a directory's files, in short."""
    if path.is_file():
        return fingerprint(path)[:16]
    found = [
        (file.name, file.stat().st_size, file.stat().st_mtime_ns)
        for file in sorted(path.glob("*"))
        if file.is_file()
    ]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]


def _assemble(
    reading: Reading,
    progress: Progress,
    lines: Sequence[int],
    digest: str,
    out: Path,
    tallies: Tallies,
) -> None:
    """Writes the output from the file and the progress, and counts what is in it."""
    if fingerprint(reading.path) != digest:
        raise UserError(
            f"{reading.path} was changed while it was scored; put it back, or delete "
            f"{out}.progress and score anew"
        )

    def results() -> Iterator[Mapping[str, Any]]:
        for line, (_, result) in zip(lines, progress.results(), strict=True):
            tallies.add(line, result)
            yield result

    write(out, reading.path, results(), _fields(reading))


def _fields(reading: Reading) -> dict[str, Any]:
    """The arrow types of the columns that are added."""
    import pyarrow as pa

    text, number = pa.string(), pa.float64()
    numbers = ("value", "spread")
    outcome = pa.struct({name: number if name in numbers else text for name in OUTCOME})
    sources = pa.struct({name: outcome for name in reading.chosen.active_rewards})
    return {reading.into: number, f"{reading.into}s": sources}
