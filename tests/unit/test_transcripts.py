"""Judges' calls on disk: none spoils its neighbours' file, and what waits is bounded."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from offbeat.records import Prompt, Reward, ScoreItem, Transcript
from offbeat.track import transcripts
from offbeat.track.transcripts import TranscriptWriter

ITEM = ScoreItem(Prompt(7, np.zeros(1, np.int32), "p", "q"), "answer")


def write(writer: TranscriptWriter, *calls: Transcript) -> None:
    for call in calls:
        writer.write("train", 0, [ITEM], [{"s": Reward.scored("s", 1.0, transcripts=(call,))}])


def read(folder: Path) -> list[list[str]]:
    files = sorted((folder / "transcripts").glob("*.parquet"))
    return [pq.read_table(file).column("raw").to_pylist() for file in files]


def test_what_is_no_text_and_what_is_no_small_number_spoil_no_file(tmp_path: Path) -> None:
    writer = TranscriptWriter(tmp_path)
    write(writer, Transcript("a", "8"), Transcript("\ud800", "\udfff!", prompt_tokens=2**40))
    writer.close()
    assert writer.lost == 0
    assert read(tmp_path) == [["8", "?!"]]


def test_a_second_start_writes_behind_the_first(tmp_path: Path) -> None:
    for said in ("first", "second"):
        writer = TranscriptWriter(tmp_path)
        write(writer, Transcript("a", said))
        writer.close()
    assert read(tmp_path) == [["first"], ["second"]]


def test_large_texts_are_written_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcripts, "CHARACTERS_A_FILE", 1000)
    writer = TranscriptWriter(tmp_path)
    write(writer, *[Transcript("x" * 600, str(number)) for number in range(8)])
    writer.close()
    assert read(tmp_path) == [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"]]
    assert writer.lost == 0


def test_what_waits_is_bounded_and_what_is_lost_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transcripts, "MOST_CHARACTERS", 1000)
    writer = TranscriptWriter(tmp_path)
    write(writer, *[Transcript("x" * 299, str(number)) for number in range(8)])
    writer.close()
    assert read(tmp_path) == [["0", "1", "2"]]
    assert writer.lost == 5
    writer = TranscriptWriter(tmp_path)
    monkeypatch.setattr(transcripts, "CHARACTERS_A_FILE", 1)
    for number in range(8):
        write(writer, Transcript("x" * 899, str(number)))
        while writer._held:
            time.sleep(0.001)
    writer.close()
    assert writer.lost == 0
