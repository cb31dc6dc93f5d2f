"""The shared tier on a real server: what is kept, for how long, who sees it, and what others cannot do."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ktransformer2.bench.valkey_server import free_port
from ktransformer2.cli.guard import EXIT_USAGE
from ktransformer2.errors import ConfigError
from ktransformer2.tiers import valkey
from ktransformer2.tiers.deployment import Deployment
from ktransformer2.tiers.tier import StoredBlock
from ktransformer2.tiers.valkey import ValkeyTier
from ktransformer2.tiers.valkey_address import ValkeyAddress
from tests.cli.invoking import failed, invoke
from tests.tiers.disk_factories import PAYLOAD_BYTES, block, chain, key_of, lineage
from tests.tiers.valkey_server import KEY, direct, running_server, tier

TTL_S = 160.0  # in steps of ten seconds


def name(key: bytes) -> bytes:
    return Deployment(KEY, lineage()).name(key)


def keys(blocks: list[StoredBlock]) -> list[bytes]:
    return [one.key for one in blocks]


def expiries(port: int, blocks: list[StoredBlock]) -> list[int]:
    """When blocks expire, ms on the server's clock."""
    return [direct(port).pexpiretime(name(one.key)) for one in blocks]


def test_what_one_process_puts_another_gets_byte_for_byte(port: int) -> None:
    blocks = chain("a", 5)
    with tier(port) as writer, tier(port) as reader:
        assert writer.put(blocks) == 5
        found = reader.get(keys(blocks))
        assert found == [one.payload for one in blocks]
        assert all(isinstance(payload, bytearray) for payload in found)
        stats, seen = writer.stats(), reader.stats()
    assert (stats.stored_blocks, stats.stored_bytes, stats.transfers) == (5, 5 * PAYLOAD_BYTES, 1)
    assert (stats.held_blocks, stats.held_bytes) == (5, 5 * PAYLOAD_BYTES)
    assert (seen.loaded_blocks, seen.loaded_bytes, seen.transfers) == (5, 5 * PAYLOAD_BYTES, 1)
    assert stats.failures == seen.failures == {}


def test_a_batch_is_two_pipelines_and_what_is_there_is_not_sent_again(port: int) -> None:
    client, blocks = direct(port), chain("a", 8)
    with tier(port) as writer:
        writer.put(blocks)
        before = client.info("stats")["total_net_input_bytes"]
        assert writer.put(blocks) == 8
        assert client.info("stats")["total_net_input_bytes"] - before < PAYLOAD_BYTES
        assert (writer.stats().stored_blocks, writer.stats().transfers) == (8, 1)


def test_a_chain_is_given_up_to_its_first_gap(port: int) -> None:
    blocks = chain("a", 4)
    with tier(port) as one:
        one.put(blocks)
        direct(port).delete(name(blocks[2].key))
        assert len(one.get(keys(blocks))) == 2
        assert one.get([blocks[2].key]) == []
        assert one.get([*keys(blocks[:1]), key_of("a0", 7)]) == [blocks[0].payload]  # no such layer group


def test_a_block_without_its_parent_is_left_out(port: int) -> None:
    blocks = chain("a", 4)
    with tier(port) as one:
        assert one.put(blocks[1:]) == 0
        assert one.put([blocks[0], *blocks[2:]]) == 1
        assert one.put(blocks[1:3]) == 2  # the parent lies there from before
    assert direct(port).dbsize() == 3


def test_blocks_with_a_window_do_without_the_one_before(port: int) -> None:
    kind = lineage(payload_bytes=(PAYLOAD_BYTES, 500))
    second = block("w1", "w0", group=1, num_bytes=500)
    with tier(port, kind) as one:
        assert one.put([second]) == 1
        assert one.get([second.key]) == [second.payload]
        one.refresh()
        assert (one.stats().held_blocks, one.stats().held_bytes) == (1, 500)


def test_pieces_are_bounded_and_nothing_is_lost_between_them(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(valkey, "_PIECE_BYTES", 3 * PAYLOAD_BYTES)
    monkeypatch.setattr(valkey, "_NAMES_AT_ONCE", 2)
    blocks = chain("a", 10)
    with tier(port) as one:
        assert one.put(blocks) == 10
        assert one.get(keys(blocks)) == [each.payload for each in blocks]
        assert one.stats().transfers == 8
        assert one.stats().median_transfer_bytes == 3 * PAYLOAD_BYTES


def test_what_is_too_large_or_of_another_shape_is_left_out_and_counted(port: int) -> None:
    with tier(port, max_value_bytes=PAYLOAD_BYTES) as one:
        assert one.put(chain("a", 2)) == 0
        assert one.put([replace(block("b"), payload=b"short"), block("c", group=1)]) == 0
        assert one.stats().failures == {"too_large": 2, "unfit": 2}
    assert direct(port).dbsize() == 0


# --- time to live


def test_a_use_renews_all_blocks_before_it_to_one_moment(port: int) -> None:
    client, blocks = direct(port), chain("a", 6)
    with tier(port, ttl_s=TTL_S) as one:
        one.put(blocks[:3])
        one.put(blocks[3:])
        (expiry,) = set(expiries(port, blocks))
        seconds, micros = client.time()
        assert TTL_S * 1000 <= expiry - (seconds * 1000 + micros // 1000) + 1000 <= TTL_S * 1000 * 17 / 16 + 1000
        assert expiry % 10_000 == 0
    for at, each in enumerate(blocks):  # as if it had been long ago; children no later than their parents
        client.pexpire(name(each.key), 50_000 - 1000 * at)
    with tier(port, ttl_s=TTL_S) as other:  # another process, which has the first blocks from elsewhere
        assert len(other.get(keys(blocks[3:5]))) == 2
        renewed = expiries(port, blocks)
    assert len(set(renewed[:5])) == 1
    assert renewed[0] >= expiry
    assert renewed[5] < renewed[0]


def test_a_second_use_at_the_same_time_sends_no_renewals(port: int) -> None:
    client, blocks = direct(port), chain("a", 6)
    with tier(port, ttl_s=86400.0) as one:
        one.put(blocks)
        client.config_resetstat()
        assert len(one.get(keys(blocks))) == 6
        assert one.put(blocks) == 6
    assert "cmdstat_pexpireat" not in client.info("commandstats")


def test_a_child_lives_no_longer_than_a_parent_whose_way_to_the_root_is_lost(port: int) -> None:
    client, blocks = direct(port), chain("a", 5)
    with tier(port, ttl_s=TTL_S) as one:
        one.put(blocks[:3])
    client.pexpire(name(blocks[2].key), 30_000)
    before = expiries(port, blocks)
    client.delete(name(blocks[0].key))  # the server has lost the root
    with tier(port, ttl_s=TTL_S) as other:
        assert other.put(blocks[3:]) == 2
        assert other.get([blocks[2].key]) == [blocks[2].payload]
    lost, second, third, fourth, fifth = expiries(port, blocks)
    assert (lost, second, third) == (-2, *before[1:3])
    assert third - 1000 < fourth == fifth <= third


def test_what_nobody_uses_expires(port: int) -> None:
    with tier(port, ttl_s=1.0) as one:
        one.put([block("a")])
        left_ms = direct(port).pttl(name(key_of("a")))
        assert 0 < left_ms <= 1063
        direct(port).pexpire(name(key_of("a")), 1)
        time.sleep(0.01)
        assert one.get([key_of("a")]) == []


# --- the filter


def test_before_the_first_look_nothing_is_denied_and_then_what_is_not_there(port: int) -> None:
    blocks = chain("a", 3)
    with tier(port) as writer, tier(port) as reader:
        writer.put(blocks)
        assert reader.may_hold(key_of("never"))
        assert reader.refresh()
        assert [reader.may_hold(key) for key in (*keys(blocks), key_of("never"))] == [True, True, True, False]
        assert (reader.stats().held_blocks, reader.stats().held_bytes) == (3, 3 * PAYLOAD_BYTES)
        assert (reader.stats().lookups, reader.stats().filter_saved) == (5, 1)


def test_what_this_process_wrote_or_read_is_never_denied(port: int) -> None:
    with tier(port) as writer, tier(port) as reader:
        reader.refresh()
        writer.refresh()
        writer.put([block("a")])
        assert writer.may_hold(key_of("a"))
        assert not reader.may_hold(key_of("a"))  # it cannot know yet
        assert reader.get([key_of("a")]) == [block("a").payload]
        assert reader.may_hold(key_of("a"))
        reader.refresh()
        assert reader.stats().filter_missed == 0  # asked for nevertheless: nothing was lost


def test_what_others_wrote_meanwhile_is_missed_until_the_next_look_and_counted(port: int) -> None:
    blocks = chain("a", 3)
    with tier(port) as writer, tier(port) as reader:
        reader.refresh()
        writer.put(blocks)
        assert [reader.may_hold(key) for key in keys(blocks)] == [False, False, False]
        reader.refresh()
        assert [reader.may_hold(key) for key in keys(blocks)] == [True, True, True]
        assert (reader.stats().filter_missed, reader.stats().filter_saved) == (3, 3)


def test_what_the_filter_lets_pass_in_vain_ends_in_a_miss_that_is_counted(port: int) -> None:
    with tier(port) as one:
        one.put([block("a")])
        one.refresh()
        direct(port).flushall()  # the server forgets
        assert one.may_hold(key_of("a"))
        assert one.get([key_of("a")]) == []
        assert (one.stats().filter_false, one.stats().failures) == (1, {})


def test_a_server_with_too_many_blocks_has_no_filter(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(valkey, "MOST_SCANNED", 2)
    with tier(port) as one:
        one.put(chain("a", 3))
        assert not one.refresh()
        assert one.may_hold(key_of("never"))
        assert one.stats().failures == {"scan": 1}


def test_a_thread_keeps_the_filter_fresh_until_it_is_closed(port: int) -> None:
    with tier(port) as writer:
        writer.put([block("a")])
        address = ValkeyAddress(f"valkey://127.0.0.1:{port}", bloom_refresh_s=1.0)
        reader = ValkeyTier.open(address, lineage(), KEY)
        try:
            _until(lambda: not reader.may_hold(key_of("never")))
            assert reader.may_hold(key_of("a"))
            writer.put([block("b")])
            _until(lambda: reader.may_hold(key_of("b")))
        finally:
            reader.close()
        assert reader._thread is not None
        assert not reader._thread.is_alive()


def _until(condition: Any) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# --- who may


def test_what_others_put_there_is_never_read(port: int) -> None:
    """Another key, a swapped value, a changed byte, one cut short, another kind of value: a miss each, and counted."""
    client, one_block, two = direct(port), block("a"), block("b")
    good = Deployment(KEY, lineage()).seal(one_block, 0.0)
    forged = Deployment(b"the key of somebody else", lineage()).seal(one_block, 0.0)
    swapped = Deployment(KEY, lineage()).seal(two, 0.0)
    wrong = [forged, swapped, good[:-1], good[:100], b"", good[:50] + b"?" + good[51:], good + b"?", good[:-32]]
    with tier(port) as one:
        for value in wrong:
            client.set(name(one_block.key), value)
            assert one.get([one_block.key]) == []
            assert client.exists(name(one_block.key)) == 0  # taken away, so that a whole one can come
        assert one.stats().failures == {"signature": len(wrong)}
        client.rpush(name(one_block.key), "a list")
        assert one.get([one_block.key]) == []
        client.set(name(two.key), swapped)
        assert one.get([two.key]) == [two.payload]


def test_deployments_and_lineages_do_not_see_each_other(port: int) -> None:
    blocks = chain("a", 2)
    with (
        tier(port) as one,
        tier(port, key=b"the key of somebody else") as stranger,
        tier(port, lineage("other model")) as other,
    ):
        for each in (one, stranger, other):
            assert each.put(blocks) == 2
            assert each.refresh()
            assert each.stats().held_blocks == 2
        direct(port).set("a name of somebody else", "kept")
        assert direct(port).dbsize() == 7
        assert [len(each.get(keys(blocks))) for each in (one, stranger, other)] == [2, 2, 2]
        value = Deployment(KEY, lineage()).value_bytes(0)
        assert one.clear() == 4 * value  # both lineages of the deployment
        assert one.stats().held_blocks == 0
        assert not one.may_hold(blocks[0].key)
        assert [len(each.get(keys(blocks))) for each in (one, stranger, other)] == [0, 2, 0]
        assert direct(port).get("a name of somebody else") == b"kept"


def test_the_command_clears_what_its_deployment_keeps(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    file.write_bytes(KEY)
    monkeypatch.setenv("KTRANSFORMER_VALKEY_URL", f"redis://127.0.0.1:{port}")
    monkeypatch.setenv("KTRANSFORMER_VALKEY_KEY_FILE", str(file))
    with tier(port) as one, tier(port, key=b"the key of somebody else") as stranger:
        for each in (one, stranger):
            assert each.put(chain("a", 2)) == 2
        done = invoke("cache", "clear", "--server", "--json")
        assert json.loads(done.stdout) == {"freed_bytes": 2 * Deployment(KEY, lineage()).value_bytes(0)}
        assert [len(each.get(keys(chain("a", 2)))) for each in (one, stranger)] == [0, 2]
    monkeypatch.setenv("KTRANSFORMER_VALKEY_URL", "")
    assert "no server is set" in failed(invoke("cache", "clear", "--server"), EXIT_USAGE)


def test_a_full_server_takes_what_it_can_and_no_child_without_its_parent(port: int) -> None:
    client = direct(port)
    large = 300_000
    kind = lineage(payload_bytes=(large,))
    blocks = [block(f"a{i}", f"a{i - 1}" if i else None, num_bytes=large) for i in range(8)]
    client.config_set("maxmemory", client.info("memory")["used_memory"] + 1_000_000)
    try:
        with tier(port, kind) as one:
            held = one.put(blocks)
            assert 0 < held < 8
            assert one.stats().failures.keys() == {"full"}
            assert len(one.get(keys(blocks))) == held
            assert direct(port).dbsize() == held
    finally:
        client.config_set("maxmemory", 0)


def test_a_closed_tier_holds_nothing_and_raises_nothing(port: int) -> None:
    with tier(port) as one:
        one.put([block("a")])
        one.close()
        one.close()
        assert (one.put([block("a")]), one.get([key_of("a")]), one.clear()) == (0, [], 0)
        assert not one.refresh()
        assert one.stats().failures == {}
    with tier(port) as later:
        assert later.get([key_of("a")]) == [block("a").payload]  # a lasting place keeps what was put


def test_a_password_is_given_and_never_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    with running_server(tmp_path, port, "--requirepass", "s3cret"):
        for password, held in (("s3cret", 1), ("wr0ng", 0)):
            address = ValkeyAddress(f"valkey://:{password}@127.0.0.1:{port}")
            one = ValkeyTier(address, lineage(), KEY)
            assert one.put([block("a")]) == held
            one.close()
        assert one.stats().failures == {"look": 1}
    assert caplog.messages == [
        f"the remote tier: look: AuthenticationError from valkey://127.0.0.1:{port}/0; going on without"
    ]


def test_tls_checks_who_the_server_is(tmp_path: Path) -> None:
    certificate, private = _certificate(tmp_path)
    port = free_port()
    tls = ["--tls-port", str(port), "--port", "0", "--tls-auth-clients", "no"]
    tls += ["--tls-cert-file", certificate, "--tls-key-file", private, "--tls-ca-cert-file", certificate]
    with running_server(tmp_path, port, *tls):
        trusting = ValkeyAddress(f"valkeys://localhost:{port}?ssl_ca_certs={certificate}", timeout_s=5.0)
        one = ValkeyTier(trusting, lineage(), KEY)
        assert one.put([block("a")]) == 1
        assert one.get([key_of("a")]) == [block("a").payload]
        one.close()
        other = ValkeyTier(ValkeyAddress(f"valkeys://localhost:{port}", timeout_s=5.0), lineage(), KEY)
        assert other.get([key_of("a")]) == []  # nobody has vouched for that certificate
        assert other.stats().failures == {"read": 1}
        other.close()


def _certificate(folder: Path) -> tuple[str, str]:
    """A certificate of its own for localhost, and its private key."""
    files = str(folder / "cert.pem"), str(folder / "key.pem")
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    made += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-out", files[0], "-keyout", files[1]]
    try:
        subprocess.run(made, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return files


def test_without_the_package_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r'pip install "ktransformer2\[valkey\]"'):
        ValkeyTier(ValkeyAddress("valkey://cache"), lineage(), KEY)
