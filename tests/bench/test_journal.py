"""A journal: done pieces are not done again, a torn line is no piece, another run's file is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from ktransformer2.bench.journal import Journal
from ktransformer2.errors import ConfigError

RUN = {"seed": 1, "commit": "abc"}


class Work:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, int]:
        self.calls += 1
        return {"calls": self.calls}


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    path, work = tmp_path / "new" / "run.jsonl", Work()
    assert Journal(path, RUN).piece("a", work) == {"calls": 1}
    later = Journal(path, RUN)
    assert len(later) == 1
    assert later.piece("a", work) == {"calls": 1}
    assert later.piece("b", work) == {"calls": 2}
    assert work.calls == 2


def test_without_a_file_a_run_remembers_its_own_pieces(tmp_path: Path) -> None:
    journal, work = Journal(None, RUN), Work()
    assert journal.piece("a", work) == journal.piece("a", work) == {"calls": 1}
    assert list(tmp_path.iterdir()) == []


def test_a_line_cut_short_is_no_piece_and_spoils_no_other(tmp_path: Path) -> None:
    path, work = tmp_path / "run.jsonl", Work()
    journal = Journal(path, RUN)
    journal.piece("a", work)
    journal.piece("b", work)
    path.write_text(path.read_text()[:-5])
    assert Journal(path, RUN).piece("b", work) == {"calls": 3}
    assert len(Journal(path, RUN)) == 2


def test_another_runs_file_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    Journal(path, RUN).piece("a", Work())
    before = path.read_text()
    with pytest.raises(ConfigError, match=r"journal of another run \(commit='abc', now 'def'\); name another file"):
        Journal(path, {**RUN, "commit": "def"})
    assert path.read_text() == before


@pytest.mark.parametrize("content", ["text\n", "[1]\n", "{}\n"])
def test_a_file_that_is_no_journal_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match="is no journal of a run"):
        Journal(path, RUN)
    assert path.read_text() == content
