"""The codec by itself, without libp2p, trio or any I/O of its own: messages over a pipe of your choice.

    python examples/decode_stream.py

Here the pipe is a socket pair, and what comes is taken 7 bytes at a time. A file would do as well.
"""

import socket
import threading

from neurogrid.errors import RemoteProtocolError
from neurogrid.p2p.wire import MessageDecoder, MessageType, TensorMessage, encode_message


def write(end: socket.socket) -> None:
    with end:
        for layer_id in range(3):
            message = TensorMessage(MessageType.RESPONSE, layer_id, request_id=1, data=b"x" * 100)
            end.sendall(encode_message(message))
        cut = encode_message(TensorMessage(MessageType.MODEL_CONFIG, data=b"{}"))
        end.sendall(cut[:-1])


def read(end: socket.socket) -> None:
    decoder = MessageDecoder()
    while data := end.recv(7):
        for message in decoder.receive_data(data):
            print(f"{message.msg_type.name} of layer {message.layer_id}: {len(message.data)} B")
    try:
        decoder.receive_eof()
    except RemoteProtocolError as error:
        print(f"then: {error}")


ours, theirs = socket.socketpair()
writer = threading.Thread(target=write, args=[theirs])
writer.start()
with ours:
    read(ours)
writer.join()
