"""Reading length traces, and the traces that lie in the repository."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from ktransformer2.bench.corpus import data_folder, trace_path
from ktransformer2.bench.traces import TraceRequest, read_trace
from ktransformer2.errors import ConfigError

TEXT = "arrival_ms,input_tokens,output_tokens\n0,374,44\n1500,12,0\n4314.5,396,109\n"


@pytest.mark.parametrize("packed", [False, True])
def test_requests_without_an_answer_are_left_out(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / ("t.csv.gz" if packed else "t.csv")
    path.write_bytes(gzip.compress(TEXT.encode()) if packed else TEXT.encode())
    assert read_trace(path) == [TraceRequest(0.0, 374, 44), TraceRequest(4.3145, 396, 109)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "the header is"),
        (TEXT + "7,x,3\n", r"t\.csv:5: .* is not"),
        (TEXT + "7,1\n", r"t\.csv:5"),
        (TEXT + "7,-1,3\n", "a length is negative"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def test_traces_of_the_repository() -> None:
    conv = read_trace(trace_path("azure_2023_conv", data_folder()))
    assert len(conv) == 19_366
    assert conv[0] == TraceRequest(0.0, 374, 44)
    assert len(read_trace(trace_path("mooncake_conversation", data_folder()))) > 10_000


def test_an_unknown_trace_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="azure_2023_conv"):
        trace_path("nothing")
