"""What we rely on in qh3 beyond its public face. Named here one by one: what moved is what fails.

`neurogrid/p2p/quic` stands on qh3 1.9.4. A later version may have another state machine: 2.x has one in Rust, which
gives credit as soon as bytes arrive and cannot be told otherwise.
"""

from __future__ import annotations

import inspect
from importlib.metadata import version
from typing import Any

import pytest
from qh3 import tls
from qh3._hazmat import QuicStreamSender
from qh3.quic import connection, events, packet, packet_builder, stream
from qh3.quic.connection import QuicConnection

from tests.unit.quic_pair import Pair


def test_the_version_is_the_pinned_one() -> None:
    assert version("qh3") == "1.9.4"


@pytest.mark.parametrize(
    ("where", "name"),
    [
        *[
            (QuicConnection, name)
            for name in (
                "_get_or_create_stream",
                "_get_or_create_stream_for_send",
                "_handle_new_connection_id_frame",
                "_handle_stream_data_blocked_frame",
                "_initialize",
                "_write_reset_stream_frame",
                "_write_stop_sending_frame",
                "datagrams_to_send",
                "get_next_available_stream_id",
                "get_timer",
                "handle_timer",
                "receive_datagram",
                "send_ping",
                "send_stream_data",
            )
        ],
        *[
            (tls.Context, name)
            for name in (
                "_process_certificate",
                "_server_handle_hello",
                "_setup_traffic_protection",
                "handle_message",
            )
        ],
        *[
            (QuicStreamSender, name)
            for name in (
                "buffer_is_empty",
                "get_reset_frame",
                "highest_offset",
                "is_finished",
                "on_data_delivery",
                "on_reset_delivery",
                "prepare_stream_frame",
                "reset",
                "reset_pending",
                "write",
            )
        ],
        (connection, "END_STATES"),
        (connection, "RESET_STREAM_FRAME_CAPACITY"),
        (connection, "STOP_SENDING_FRAME_CAPACITY"),
        (events, "StopSendingReceived"),
        (packet, "encode_quic_retry"),
        (packet_builder, "MTU_PROBE_SIZES"),
        (packet_builder.QuicPacketBuilder, "remaining_buffer_space"),
        (packet_builder.QuicPacketBuilder, "remaining_flight_space"),
        (stream, "QuicStream"),
        (tls, "push_block"),
        (tls, "push_extension"),
        (tls, "push_list"),
        (tls, "push_message"),
        (tls, "push_opaque"),
        (tls, "pull_certificate"),
        (tls, "pull_certificate_verify"),
    ],
)
def test_it_is_there(where: Any, name: str) -> None:
    assert hasattr(where, name), f"qh3 has no {where.__name__}.{name} any more"


def test_attributes_of_a_connection_are_there() -> None:
    pair = Pair()
    pair.run(20)
    for name in (
        "_close_event",
        "_effective_idle_timeout",
        "_handshake_confirmed",
        "_host_cids",
        "_local_max_data",
        "_local_max_streams_bidi",
        "_local_max_streams_uni",
        "_loss",
        "_mtu_probe_sizes",
        "_network_paths",
        "_peer_cid_sequence_numbers",
        "_peer_retire_prior_to",
        "_remote_max_streams_bidi",
        "_state",
        "_streams",
        "_streams_dirty_limits",
        "_streams_finished",
    ):
        assert name in QuicConnection.__slots__, f"qh3's connection has no {name} any more"
    for name in ("is_validated", "local_challenge_sent"):
        assert hasattr(pair.server._network_paths[0], name), f"qh3's path has no {name} any more"
    for name in (
        "_alps_negotiated",
        "_compress_certificate_algorithms",
        "_peer_certificate",
        "_supported_groups",
        "_verify_mode",
        "alpn_negotiated",
        "certificate",
        "certificate_chain",
        "certificate_private_key",
        "key_schedule",
        "state",
    ):
        assert hasattr(pair.client.tls, name), f"qh3's TLS has no {name} any more"


def test_the_limits_are_raised_where_ours_stand_in() -> None:
    """The places where qh3 would raise them by itself; another such place would need another stand-in."""
    source = inspect.getsource(connection)
    assert source.count("max_stream_data_local *= 2") == 2
    assert source.count("limit.value *= 2") == 1
