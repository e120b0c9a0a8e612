"""An S3 server on this machine (moto's), and faults that it answers with."""

import logging
import socket
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "any",
    "AWS_SECRET_ACCESS_KEY": "any",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
}
BUCKET = "bucket"
_BUSY = """<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>{}</Code><Message>{}</Message></Error>"""
ANSWERS = {
    "throttles": ("503 Slow Down", _BUSY.format("SlowDown", "Please reduce your request rate.")),
    "refuses": ("403 Forbidden", _BUSY.format("AccessDenied", "Access Denied")),
    "fails": ("500 Internal Server Error", _BUSY.format("InternalError", "Please try again.")),
}


class Server:
    """Serves `BUCKET` until `close`, from a thread.

    fault: called with each request's method and path; returns a key of `ANSWERS`, "hangs up" (closes the
    connection without an answer, or in the middle of a GET's), seconds to wait before the answer, or None.
    """

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.fault: Callable[[str, str], str | float | None] = lambda method, path: None
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.port}"
        self.environment = ENVIRONMENT | {"AWS_ENDPOINT_URL": self.url}
        # moto's buckets outlive the server.
        urllib.request.urlopen(f"{self.url}/moto-api/reset", data=b"").close()
        self.client().create_bucket(Bucket=BUCKET)

    def _answer(self, environ: dict[str, Any], start_response: Callable) -> Any:
        fault = self.fault(environ["REQUEST_METHOD"], environ["PATH_INFO"])
        if isinstance(fault, str):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if fault == "hangs up" and environ["REQUEST_METHOD"] == "GET":
            start_response("200 OK", [("Content-Length", "1000000")])
            return [b"half"]
        if fault == "hangs up":
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionError
        if fault in ANSWERS:
            status, text = ANSWERS[fault]
            start_response(status, [("Content-Type", "application/xml")])
            return [text.encode()]
        time.sleep(fault or 0)
        return self._app(environ, start_response)

    def client(self) -> Any:
        """Return boto3's client: how tests look into the bucket without the package."""
        import boto3

        names = ("aws_access_key_id", "aws_secret_access_key", "region_name")
        keys = dict(zip(names, ENVIRONMENT.values(), strict=False))
        return boto3.client("s3", endpoint_url=self.url, **keys)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
