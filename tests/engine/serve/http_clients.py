"""Clients that misbehave, for the tests of HTTP servers."""
import socket


def send_malformed(connect, more=()):
    """Sends what is no request, or one without end, on connections of its own, and reads until the server closes them."""
    for request in (b"\0" * 4096, b"GET / HTTP/1.1\r\n" + b"A: " + b"x" * 100000, b"GET /\r\n\r\n",
                    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n" + b"x" * 65536,
                    *more):
        with connect() as client:
            try:
                client.sendall(request)
                client.shutdown(socket.SHUT_WR)
                while client.recv(1 << 16):
                    pass
            except OSError:
                pass


def answer_of(connect, request):
    """First bytes of the answer to a request as it is."""
    with connect() as client:
        client.sendall(request)
        return client.recv(1 << 16)
