"""The pair and the server that most tests here share."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from serving import Server, make_pair

from deltatree import Pair


@pytest.fixture(scope="session")
def pair() -> Pair:
    return make_pair()


@pytest.fixture(scope="session")
def server(pair):
    running = Server(pair)
    yield running
    running.stop()


@pytest.fixture
def start(pair):
    """Start further servers with their own options."""
    running = []

    def begin(given: Pair | None = None, **options) -> Server:
        running.append(Server(given or pair, **options))
        return running[-1]

    yield begin
    for one in running:
        one.stop()
