"""An engine's `/metrics`, for who reads it over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

PATH = "/metrics"


@contextmanager
def metrics_server(texts: list[str], *, has_head: bool = True) -> Iterator[str]:
    """Gives the address, HOST:PORT; each text is served once, the last one for good.

    Without a head, the text is all that is sent.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = (texts.pop(0) if len(texts) > 1 else texts[0]).encode()
            if has_head:
                self.send_response(200 if self.path == PATH else 404)
                self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()
