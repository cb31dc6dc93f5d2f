"""The package as a whole: what importing costs, what it exports, and the rules of the test run itself."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import ktransformer2
from tests.conftest import allowed_skips, unnamed_skips


def test_importing_the_package_imports_no_torch() -> None:
    script = "import sys, ktransformer2; print(sorted({'torch', 'transformers', 'numpy', 'typer'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_exported_name_is_found() -> None:
    for name in ktransformer2.__all__:
        assert getattr(ktransformer2, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        ktransformer2.LMM  # noqa: B018 - the access is what is tested


def test_pins_cover_every_dependency(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = project["dependencies"] + [d for extra in project["optional-dependencies"].values() for d in extra]
    lines = [
        line
        for name in ("run.txt", "dev.txt")
        for line in (repository / "requirements" / name).read_text(encoding="utf-8").splitlines()
        if line and not line.startswith(("#", "-r"))
    ]
    assert all("==" in line and "+" not in line and "@" not in line for line in lines)
    pinned = {line.partition("==")[0] for line in lines}
    assert {d.partition(">")[0].replace("_", "-") for d in wanted} - pinned == set()


def test_the_demo_contract_ships_inside_the_package() -> None:
    data = Path(ktransformer2.__file__).parent / "data"
    assert "CC BY 4.0" in (data / "README.md").read_text(encoding="utf-8")
    assert 30_000 < (data / "contract.txt").stat().st_size < 300_000


@pytest.fixture(scope="module")
def built(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The file names of a wheel (without the extension, so that it takes a second) and of a source archive."""
    folder = tmp_path_factory.mktemp("dist")
    build = "from scikit_build_core import build; build.build_wheel({0!r}); build.build_sdist({0!r})"
    command = [sys.executable, "-c", build.format(str(folder))]
    without = {**os.environ, "KTRANSFORMER_NO_NATIVE": "1"}
    subprocess.run(command, cwd=repository, env=without, capture_output=True, text=True, check=True)
    (wheel,), (archive,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        return {"wheel": zipfile.ZipFile(wheel).namelist(), "sdist": tar.getnames()}


def test_the_wheel_holds_the_package_its_types_and_its_licences(repository: Path, built: dict[str, list[str]]) -> None:
    metadata = f"ktransformer2-{ktransformer2.__version__}.dist-info"
    package = {name for name in built["wheel"] if not name.startswith(metadata)}
    source = repository / "src"
    files = (path for path in (source / "ktransformer2").rglob("*.*") if path.suffix not in (".pyc", ".so"))
    assert package == {path.relative_to(source).as_posix() for path in files}
    assert {"ktransformer2/py.typed", "ktransformer2/_native.pyi", "ktransformer2/data/contract.txt"} < package
    licences = {"LICENSE", "THIRD_PARTY.md", "src/ktransformer2/data/README.md"}
    assert {f"{metadata}/licenses/{name}" for name in licences} < set(built["wheel"])


def test_the_source_archive_holds_what_a_build_needs_and_no_more(repository: Path, built: dict[str, list[str]]) -> None:
    root = f"ktransformer2-{ktransformer2.__version__}"
    names = {name.removeprefix(f"{root}/") for name in built["sdist"]}
    assert {f"csrc/{path.name}" for path in (repository / "csrc").iterdir()} < names
    assert {"CMakeLists.txt", "LICENSE", "README.md", "THIRD_PARTY.md", "pyproject.toml", "PKG-INFO"} < names
    assert {name.partition("/")[0] for name in names} & {
        "tests",
        "docs",
        "benchmarks",
        "examples",
        "requirements",
    } == set()


def test_the_stub_of_the_kernels_is_the_one_that_is_generated(repository: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("ktransformer2._native") is None:
        pytest.skip("the extension is not built")
    stub = "src/ktransformer2/_native.pyi"
    command = [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "ktransformer2._native", "-o"]
    subprocess.run(
        [*command, str(tmp_path / "_native.pyi")], cwd=repository, capture_output=True, text=True, check=True
    )
    assert (tmp_path / "_native.pyi").read_text() == (repository / stub).read_text(), (
        f"csrc/module.cpp was changed; write the stub anew: python {' '.join(command[1:])} {stub}"
    )


def test_repository_data_stays_small(repository: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=repository, capture_output=True, text=True, check=True)
    files = [repository / name for name in listed.stdout.split("\0") if name]
    assert sum(f.stat().st_size for f in files if f.exists()) < 15_000_000


def test_both_readmes_have_the_same_sections(repository: Path) -> None:
    def shape(name: str) -> list[tuple[str, ...]]:
        """Per section: its depth, and its code blocks without comments, which must not differ between languages."""
        sections: list[tuple[str, ...]] = []
        inside = False
        for line in (repository / name).read_text(encoding="utf-8").splitlines():
            if line.startswith("```"):
                inside = not inside
            elif inside:
                sections[-1] += (line.partition("#")[0].rstrip(),)
            elif line.startswith("#"):
                sections.append((line.split(" ")[0],))
        return sections

    assert shape("README.md") == shape("README.zh.md")


def test_a_skip_is_allowed_only_with_its_reason() -> None:
    rules = allowed_skips("# comment\ntests/a.py::* | no compiler*  # why\n")
    skips = [("tests/a.py::x", "no compiler here"), ("tests/a.py::x", "tired"), ("tests/b.py::x", "no compiler here")]
    assert unnamed_skips(skips, rules) == skips[1:]
    with pytest.raises(ValueError, match="names no reason"):
        allowed_skips("tests/a.py::x | *")


def test_what_the_tests_skip_where_something_is_missing_is_allowed(repository: Path) -> None:
    rules = allowed_skips((repository / "tests" / "allowed_skips.txt").read_text(encoding="utf-8"))
    found = [
        (f"{path.relative_to(repository)}::test", reason)
        for path in sorted((repository / "tests").rglob("test_*.py"))
        for reason in re.findall(r'(?:skipif|importorskip)\(.*reason="([^"]+)"', path.read_text(encoding="utf-8"))
    ]
    assert len(found) >= 3, found
    assert unnamed_skips(found, rules) == []


def test_a_skip_nobody_allowed_fails_the_run(tmp_path: Path, repository: Path) -> None:
    (tmp_path / "test_it.py").write_text("import pytest\n\n\ndef test_it():\n    pytest.skip('no mood')\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
    alone = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=False)
    assert alone.returncode == 0
    guarded = subprocess.run(
        [*command, "-p", "tests.conftest", str(tmp_path)], cwd=repository, capture_output=True, text=True, check=False
    )
    assert guarded.returncode == 1
    assert "SKIP NOT ALLOWED test_it.py::test_it: no mood" in guarded.stdout
