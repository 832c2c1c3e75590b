"""A webhook on this machine for the tests: it keeps what it is sent, and answers as it is told."""

import http.server
import json
import threading
from collections.abc import Iterator

SECRET = "T0SECRET/hook"


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers as the receiver's `answer` tells."""

    server: "Receiver"

    def do_POST(self) -> None:
        receiver = self.server
        receiver.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        answer = receiver.answer
        if answer == "hang":
            receiver.released.wait(20)
        elif answer == "drip":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            while not receiver.released.wait(0.05):
                self.wfile.write(b"x")
        elif answer == "nonsense":
            self.wfile.write(b"\x16\x03\x01 not HTTP\r\n\r\n")
        else:
            self.send_response(int(answer))
            if answer == 302:
                self.send_header("Location", f"http://127.0.0.1:{receiver.server_address[1]}/elsewhere")
            self.end_headers()

    def do_GET(self) -> None:  # a redirection that was followed
        self.server.bodies.append({"kind": "followed", "text": self.path})
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class Receiver(http.server.ThreadingHTTPServer):
    """A webhook that answers `answer`: a status, or "hang", "drip" or "nonsense"; `bodies` are what it was sent."""

    daemon_threads = True
    answer: int | str = 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, str]] = []
        self.released = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/{SECRET}?token=abc"

    def handle_error(self, *_: object) -> None:
        """A client that has gone away is what some tests are about."""

    def texts(self) -> list[str]:
        """The texts of what it was sent."""
        return [body["text"] for body in self.bodies]


def received() -> Iterator[Receiver]:
    """A receiver while a test runs."""
    made = Receiver()
    threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True).start()
    yield made
    made.released.set()
    made.shutdown()
    made.server_close()
