"""One server for the tests that only ask; those that break something have their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ktransformer2.models.demo import random_model
from ktransformer2.models.loading import LoadedModel
from tests.server.serving import Served, opened, served


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def loaded() -> LoadedModel:
    return random_model("float32")


@pytest.fixture(scope="package")
def server(loaded: LoadedModel) -> Iterator[Served]:
    with served(lambda: opened(loaded)) as found:
        yield found
