"""Which place wins, and what is said where one of them is wrong."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from ktransformer2 import settings
from ktransformer2.bench.targets import targets_of
from ktransformer2.config import CacheConfig, EngineConfig, TierConfig
from ktransformer2.errors import ConfigError
from ktransformer2.settings import Settings


@pytest.fixture
def resolve(tmp_path: Path) -> Resolve:
    return Resolve(tmp_path)


class Resolve:
    """`settings.resolve` in a folder of its own, with nothing of this machine."""

    def __init__(self, root: Path) -> None:
        self.folder, self.user_file = root / "project", root / "user" / "config.toml"
        self.folder.mkdir()
        self.user_file.parent.mkdir()

    def __call__(self, flags: dict[str, object] | None = None, **environ: str) -> Settings:
        return settings.resolve(flags, environ=environ, folder=self.folder, user_file=self.user_file)

    def project(self, text: str, name: str = "ktransformer.toml") -> Path:
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        return path


def test_nothing_said_is_every_default(resolve: Resolve) -> None:
    found = resolve()
    assert found.model is None
    assert found.memory == "auto"
    assert CacheConfig.load(found.cache_values) == CacheConfig()
    assert EngineConfig.load(found.engine_values) == EngineConfig()
    assert TierConfig.load(found.tier_values) == TierConfig()
    assert set(found.origins.values()) == {"default"}
    names = {f.name for config in (CacheConfig, EngineConfig, TierConfig) for f in dataclasses.fields(config)}
    assert set(found.values) == names - {"memory_bytes"} | {"model", "dtype", "runner", "weights", "memory"}


def test_flag_environment_project_user_default_in_this_order(resolve: Resolve) -> None:
    resolve.user_file.write_text('memory = "1GB"\ngrowth_factor = 1.1\nmax_step_tokens = "2k"\ndtype = "fp32"\n')
    place = resolve.project('# mine\nmemory = "2GB"\ngrowth_factor = 1.2\nmax_step_tokens = 1024\n')
    found = resolve({"memory": "4GB", "kv": None}, KTRANSFORMER_MEMORY="3GB", KTRANSFORMER_GROWTH_FACTOR="1.3")
    assert (found.memory, found.origins["memory"]) == (4 * 10**9, "--memory")
    assert (found.values["growth_factor"], found.origins["growth_factor"]) == (1.3, "KTRANSFORMER_GROWTH_FACTOR")
    assert (found.values["max_step_tokens"], found.origins["max_step_tokens"]) == (1024, f"{place}:4")
    assert (found.values["dtype"], found.origins["dtype"]) == ("fp32", f"{resolve.user_file}:4")
    assert (found.values["kv"], found.origins["kv"]) == ("auto", "default")
    assert found.llm_options["memory"] == 4 * 10**9
    assert "model" not in found.llm_options


def test_values_of_the_environment_are_read_by_their_unit(resolve: Resolve) -> None:
    found = resolve(
        KTRANSFORMER_MAX_NEW_TOKENS="1k",
        KTRANSFORMER_MAINTAIN_BYTES="16MiB",
        KTRANSFORMER_CACHED_IDLE_S="60",
        KTRANSFORMER_MAX_NUM_SEQUENCES="4",
        KTRANSFORMER_KV="full",
        KTRANSFORMER_MEMORY="auto",
        KTRANSFORMER_MODEL="some/model",
        KTRANSFORMER_DTYPE="",
    )
    assert found.engine_values["max_new_tokens"] == 1024
    assert found.engine_values["max_num_sequences"] == 4
    assert found.cache_values["maintain_bytes"] == 16 * 2**20
    assert found.cache_values["cached_idle_s"] == 60.0
    assert found.cache_values["kv"] == "full"
    assert found.memory == "auto"
    assert found.model == "some/model"
    assert found.origins["dtype"] == "default"


def test_the_programs_own_variables_are_no_knobs(resolve: Resolve) -> None:
    others = dict.fromkeys(settings.OTHER_VARIABLES, "1")
    assert resolve(None, **others, OTHER="x") == resolve()


@pytest.mark.parametrize(
    ("variable", "near"),
    [("KTRANSFORMER_MEMROY", "KTRANSFORMER_MEMORY"), ("KTRANSFORMER_CACHES", "KTRANSFORMER_CACHE")],
)
def test_an_unknown_variable_names_the_nearest(resolve: Resolve, variable: str, near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(None, **{variable: "1"})
    assert str(caught.value) == f"{variable}: unknown environment variable; did you mean {near!r}?"


@pytest.mark.parametrize("name", ["ktransformer.toml", "pyproject.toml"])
def test_an_unknown_key_names_file_line_and_the_nearest(resolve: Resolve, name: str) -> None:
    head = "[tool.other]\ngrow_factor = 1\n\n[tool.ktransformer]\n" if name == "pyproject.toml" else "\n"
    place = resolve.project(f'{head}memory = "1GB"\ngrow_factor = 2\n', name)
    with pytest.raises(ConfigError) as caught:
        resolve()
    line = head.count("\n") + 2
    assert str(caught.value) == f"{place}:{line}: unknown setting 'grow_factor'; did you mean 'growth_factor'?"


def test_a_key_like_no_other_points_to_the_list(resolve: Resolve) -> None:
    place = resolve.project("zzz = 1\n")
    with pytest.raises(ConfigError) as caught:
        resolve()
    assert str(caught.value) == f"{place}:1: unknown setting 'zzz'; `ktransformer config show` lists what there is"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("growth_factor = 0.5", "growth_factor=0.5 is not allowed; allowed: 1 to 1000"),
        ('growth_factor = "1.5"', "growth_factor='1.5' is not allowed; allowed: a finite number"),
        ("kv = 8", "kv=8 is not allowed; allowed: a text"),
        ('kv = "int4"', "kv='int4' is not allowed; allowed: auto, full, int8"),
        ('memory = "lots"', "size 'lots' is not understood; write a number with a unit, such as 4GB or 512MiB"),
        ("memory = [1]", "size [1] is not understood; write a number with a unit, such as 4GB or 512MiB"),
        ("memory = 1.5", "size 1.5 is not understood; write a number with a unit, such as 4GB or 512MiB"),
        ('memory = "1.5"', "size '1.5' is not understood; write a number with a unit, such as 4GB or 512MiB"),
        ("memory = true", "size True is not understood; write a number with a unit, such as 4GB or 512MiB"),
        ('max_new_tokens = "1.5"', "token count '1.5' is not understood; write a number such as 8192 or 32k"),
        ('max_step_tokens = "9GB"', "token count '9GB' is not understood; write a number such as 8192 or 32k"),
        ("model = 3", "model=3 is not allowed; allowed: a text"),
        ("block_tokens = true", "block_tokens=True is not allowed; allowed: a whole number up to 2^46"),
    ],
)
def test_a_wrong_value_names_its_place_and_what_is_allowed(resolve: Resolve, line: str, why: str) -> None:
    place = resolve.project(line + "\n")
    with pytest.raises(ConfigError) as caught:
        resolve()
    assert str(caught.value) == f"{place}:1: {why}"


def test_a_wrong_value_is_an_error_where_another_place_wins_too(resolve: Resolve) -> None:
    resolve.project("growth_factor = 0.5\n")
    with pytest.raises(ConfigError, match=r"growth_factor=0\.5 is not allowed"):
        resolve(None, KTRANSFORMER_GROWTH_FACTOR="2")


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("KTRANSFORMER_MAX_NUM_SEQUENCES", "4.5", "allowed: a whole number"),
        ("KTRANSFORMER_LOW_FREE_RATIO", "few", "allowed: a number"),
        ("KTRANSFORMER_LOW_FREE_RATIO", "nan", "allowed: a finite number"),
        ("KTRANSFORMER_BLOCK_TOKENS", "100", "allowed: 16, 32, 64, 128, 256"),
    ],
)
def test_a_wrong_variable_names_itself(resolve: Resolve, name: str, value: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        resolve(None, **{name: value})
    assert str(caught.value).startswith(f"{name}: ")


def test_a_flag_names_itself(resolve: Resolve) -> None:
    with pytest.raises(ConfigError, match=r"^--max-new-tokens: max_new_tokens=0 is not allowed; allowed: 1 or more"):
        resolve({"max_new_tokens": 0})


def test_the_projects_own_file_comes_before_pyproject(resolve: Resolve) -> None:
    resolve.project('[tool.ktransformer]\nmemory = "1GB"\nkv = "full"\n', "pyproject.toml")
    assert resolve().values["kv"] == "full"
    own = resolve.project('memory = "2GB"\n')
    assert resolve().memory == 2 * 10**9
    assert resolve().values["kv"] == "auto"
    assert settings.files(resolve.folder, resolve.user_file) == [own]


def test_a_pyproject_without_our_table_says_nothing(resolve: Resolve) -> None:
    resolve.project("[tool.ruff]\n# [tool.ktransformer]\n", "pyproject.toml")
    assert resolve() == resolve()
    assert settings.project_file(resolve.folder) is None


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('[tool.ktransformer]\nmemory = "2GB"\n', ":2"),
        ('[tool]\nktransformer = { memory = "2GB" }\n', ""),
        ('tool.ktransformer.memory = "2GB"\n', ":1"),
        ('[other]\nmemory = 1\n[ tool . "ktransformer" ]\nmemory = "2GB"\n', ":4"),
        ('[tool]\nktransformer.memory = "2GB"\n', ":2"),
    ],
)
def test_every_spelling_of_our_table_counts(resolve: Resolve, content: str, line: str) -> None:
    place = resolve.project(content, "pyproject.toml")
    found = resolve()
    assert (found.memory, found.origins["memory"]) == (2 * 10**9, f"{place}{line}")


@pytest.mark.parametrize("name", ["ktransformer2", "ktransformers", "KTransformer"])
def test_a_table_that_nearly_has_our_name_is_not_passed_over(resolve: Resolve, name: str) -> None:
    place = resolve.project(f'\n[tool.{name}]\nmemory = "2GB"\n', "pyproject.toml")
    with pytest.raises(ConfigError) as caught:
        resolve()
    assert str(caught.value) == f"{place}:2: nobody reads [tool.{name}]; it is [tool.ktransformer]"


def test_our_table_is_a_table(resolve: Resolve) -> None:
    place = resolve.project("[tool]\nktransformer = 3\n", "pyproject.toml")
    with pytest.raises(ConfigError) as caught:
        resolve()
    assert str(caught.value) == f"{place}: tool.ktransformer='3' is not allowed; allowed: a table of settings"


@pytest.mark.parametrize(
    ("content", "why"),
    [(b"memory = \n", "is no TOML"), (b"kv = '\xff'", "cannot be read"), (b"[memory]\n", "not understood")],
)
def test_a_broken_file_is_one_error_with_its_name(resolve: Resolve, content: bytes, why: str) -> None:
    place = resolve.folder / "ktransformer.toml"
    place.write_bytes(content)
    with pytest.raises(ConfigError, match=why) as caught:
        resolve()
    assert str(caught.value).startswith(str(place))


def test_every_knob_says_what_it_does_and_what_chose_its_default() -> None:
    for each in settings.knobs().values():
        assert each.about["effect"], each.name
        assert each.about["chosen_by"], each.name


# What may stand for a default that no bench row chose.
_WITHOUT_A_ROW = (
    "no default",
    "off unless asked for",
    "a limit, for safety",
    "the user's wish",
    "the processor",
)


def test_every_default_has_a_row_that_chose_it_or_says_that_it_has_none(repository: Path) -> None:
    results = [json.loads(path.read_text()) for path in (repository / "benchmarks" / "results").glob("*.json")]
    rows = {
        (part, row["knob"]): row
        for result in results
        for part in result.get("configuration", {}).get("options", {}).get("parts", ())
        for row in result["rows"]
        if is_of_a_default(row)
    }
    for each in settings.knobs().values():
        chosen_by = each.about["chosen_by"]
        named = re.search(r"bench memory --part (\w+): (\w+)", chosen_by)
        if of_key := re.match(r"bench (\w+): (\w+)", chosen_by):
            assert of_key[2] in targets_of(of_key[1]), f"{each.name}: {chosen_by}"
            continue
        if named is None:
            assert chosen_by.startswith(_WITHOUT_A_ROW), f"{each.name}: {chosen_by}"
            continue
        assert named[2] == each.name
        row = rows[named[1], named[2]]
        assert row["value"] == each.default, f"{each.name} has another default than was measured: run the bench again"
        assert ("beaten" in row["against_default"]) == ("beaten" in chosen_by), (row, chosen_by)
        assert ("does not tell" in row["against_default"]) == ("alike" in chosen_by), (row, chosen_by)


def is_of_a_default(row: dict[str, Any]) -> bool:
    return "knob" in row and str(row["against_default"]).startswith("DEFAULT")


def test_a_bench_key_that_a_knob_names_has_a_target() -> None:
    from ktransformer2.bench.targets import TARGETS

    keys = {(target.bench, target.key) for target in TARGETS}
    for each in settings.knobs().values():
        for bench, names in re.findall(r"held by bench (\w+): ([\w, ]+)", each.about["chosen_by"]):
            assert {(bench, name) for name in names.split(", ")} <= keys, each.about["chosen_by"]
