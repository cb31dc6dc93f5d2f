"""Who may come in: hosts, origins, keys, places, sizes. And that keys keep prefixes apart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from ktransformer2.errors import ConfigError
from ktransformer2.models.loading import LoadedModel
from ktransformer2.server.keys import LOCAL, Caller, Keys
from ktransformer2.server.limits import Ledger, Limits
from ktransformer2.server.problems import ApiError
from ktransformer2.server.serving import Address, open_address
from tests.server.serving import Served, opened, served

ANNA, BERT = "anna-key-0123456789", "bert-key-0123456789"
BODY = {"model": "tiny", "prompt": "one prompt for two keys, of some blocks " * 3, "max_tokens": 1}


@pytest.fixture(scope="module")
def guarded(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Anna, an admin, and Bert. Small limits."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.touch(0o600)
    path.write_text(f"anna {ANNA} admin\nbert {BERT}  # no admin\n")
    limits = Limits(body_bytes=4000, completions=3, concurrent=2, kv_bytes=2**23, drain_s=5)
    with served(lambda: opened(loaded), path, limits) as found:
        yield found


def bert(server: Served) -> dict[str, str]:
    return {"Authorization": f"Bearer {BERT}"}


def code_of(answer: Any) -> tuple[int, str]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status_code, error["code"]


ROUTES = ["/v1/models", "/metrics", "/version", "/openapi.json", "/v1/cache/stats", "/nothing", "/tokenize"]


@pytest.mark.parametrize("path", ROUTES)
def test_every_route_but_health_wants_a_key(guarded: Served, path: str) -> None:
    for wrong in ("", f"Bearer {ANNA}x", "Bearer", BERT[:-1]):
        assert code_of(guarded.http.get(path, headers={"Authorization": wrong})) == (401, "invalid_api_key")
    assert guarded.http.get("/health", headers={"Authorization": ""}).json() == {"status": "ok"}


def test_the_official_client_is_told_that_its_key_is_wrong(guarded: Served) -> None:
    with guarded.client("wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_two_keys_share_no_prefix_and_each_finds_its_own(guarded: Served) -> None:
    def cached(headers: dict[str, str]) -> int:
        usage = guarded.http.post("/v1/completions", json=BODY, headers=headers).json()["usage"]
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        return found

    length = len(str(BODY["prompt"]))
    assert [cached({}), cached(bert(guarded)), cached({}), cached(bert(guarded))] == [0, 0, length - 1, length - 1]
    found = guarded.http.post("/v1/cache/explain", json={"prompt": "one prompt for two keys, never asked"}).json()
    assert found["reason"] != "other salt"


def test_the_cache_is_shown_and_pinned_by_admins_only(guarded: Served) -> None:
    asks = (("GET", "/v1/cache/entries"), ("GET", "/v1/cache/pins"), ("POST", "/v1/cache/pin"))
    for method, path in asks:
        body = {"prompt": "x"} if method == "POST" else None
        answer = guarded.http.request(method, path, json=body, headers=bert(guarded))
        assert code_of(answer) == (403, "admin_only")
        assert guarded.http.request(method, path, json=body).status_code in (200, 409)
    assert code_of(guarded.http.delete("/v1/cache/pin/x", headers=bert(guarded))) == (403, "admin_only")


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Host": "evil.example"}, "wrong_host"),
        ({"Host": "evil.example:80"}, "wrong_host"),
        ({"Origin": "http://evil.example"}, "wrong_origin"),
        ({"Origin": "null"}, "wrong_origin"),
    ],
)
def test_a_page_of_another_name_or_origin_stays_outside(server: Served, headers: dict[str, str], code: str) -> None:
    assert code_of(server.http.get("/health", headers=headers)) == (403, code)


def test_a_page_of_the_server_itself_comes_in(server: Served) -> None:
    answer = server.http.get("/health", headers={"Origin": server.url})
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers


def test_a_body_is_bounded_however_it_is_sent(guarded: Served) -> None:
    big = json.dumps({**BODY, "prompt": "x" * 5000}).encode()
    headers = {"Content-Type": "application/json"}
    said = guarded.http.post("/v1/completions", content=big, headers=headers)
    in_parts = guarded.http.post("/v1/completions", content=iter([big[:3000], big[3000:]]), headers=headers)
    assert (code_of(said), code_of(in_parts)) == ((413, "body_too_large"), (413, "body_too_large"))


def test_too_many_answers_and_too_much_cache_are_refused_and_nothing_is_kept(guarded: Served) -> None:
    many = guarded.http.post("/v1/completions", json={**BODY, "n": 4})
    assert code_of(many) == (400, "too_many_choices")
    large = guarded.http.post("/v1/completions", json={**BODY, "max_tokens": 10_000})
    assert code_of(large) == (400, "above_quota")
    assert guarded.http.post("/v1/completions", json=BODY).status_code == 200


def test_a_key_has_so_many_places_and_another_has_its_own(guarded: Served) -> None:
    body = {**BODY, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with (
        guarded.http.stream("POST", "/v1/completions", json=body) as first,
        guarded.http.stream("POST", "/v1/completions", json=body) as second,
    ):
        assert (first.status_code, second.status_code) == (200, 200)
        refused = guarded.http.get("/version")
        assert code_of(refused) == (429, "quota_exceeded")
        assert refused.headers["retry-after"] == "1"
        assert guarded.http.get("/version", headers=bert(guarded)).status_code == 200
    while guarded.http.get("/version").status_code == 429:  # until the server has seen them go
        pass


def test_a_key_file_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "keys"

    def refused(text: str, mode: int = 0o600) -> str:
        path.write_text(text)
        path.chmod(mode)
        with pytest.raises(ConfigError) as caught:
            Keys.read(path)
        assert ANNA not in str(caught.value)
        return str(caught.value)

    assert "chmod 600" in refused(f"anna {ANNA}", 0o644)
    assert "holds no key" in refused("# nobody\n")
    assert "line 2: wanted is NAME KEY" in refused(f"anna {ANNA}\nbert\n")
    assert "line 1: wanted is NAME KEY" in refused(f"anna {ANNA} root")
    assert "16 ASCII characters" in refused("anna short")
    assert "twice" in refused(f"anna {ANNA}\nbert {ANNA}")


def test_salts_hang_on_the_key_and_on_what_the_client_adds() -> None:
    keys = Keys([("anna", ANNA, False), ("bert", BERT, False)])
    anna, other = keys.caller(f"Bearer {ANNA}"), keys.caller(f"Bearer {BERT}")
    assert anna is not None
    assert other is not None
    assert len({anna.salt(), other.salt(), anna.salt("a"), anna.salt("b"), LOCAL.salt(), LOCAL.salt("a")}) == 6
    shared = Keys([("anna", ANNA, False), ("bert", BERT, False)], share_prefixes=True)
    assert {caller.salt() for caller in map(shared.caller, (f"Bearer {ANNA}", f"Bearer {BERT}")) if caller} == {b""}
    assert ANNA not in repr(anna) + repr(keys)


def test_beyond_this_machine_a_key_is_made() -> None:
    place = open_address(Address("0.0.0.0", 0))
    place.listener.close()
    assert place.access.keys.caller(f"Bearer {place.made_key}") == Caller("default", place.made_key.encode(), True)
    assert place.access.keys.caller("") is None
    assert place.access.own_names is None
    here = open_address(Address("127.0.0.1", 0))
    with pytest.raises(ConfigError, match="--port 0"):
        open_address(Address("127.0.0.1", here.listener.getsockname()[1]))
    here.listener.close()
    assert (here.made_key, here.access.keys.caller("")) == ("", LOCAL)


def test_a_ledger_gives_back_what_was_taken() -> None:
    ledger = Ledger("things", 3)
    ledger.take("anna", 2)
    ledger.take("bert", 3)
    with pytest.raises(ApiError, match="holds 2 things and asks for 2 more; allowed: 3"):
        ledger.take("anna", 2)
    ledger.give("anna", 2)
    ledger.take("anna", 3)
    with pytest.raises(ApiError, match="asks for 4 things; allowed: 3 at once") as caught:
        ledger.take("carl", 4)
    assert caught.value.status == 400  # waiting would not help
