"""A stand-in for the Hugging Face hub: one repository of small files, on a local port."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c" * 40


class HubServer:
    """Context manager. files: name -> bytes of the repository `id`; asked: the requests so far."""

    def __init__(self, id: str, files: dict[str, bytes]):
        self.id, self.files, self.asked = id, files, []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "HubServer":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._server.server_close()


def handler(hub: HubServer) -> type:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            path = self.path.split("?")[0]
            hub.asked.append((self.command, path))
            if path == f"/api/models/{hub.id}/tree/main":
                listing = [
                    {"type": "file", "path": name, "size": len(data), "oid": oid(data)}
                    for name, data in hub.files.items()
                ]
                self.send(200, json.dumps(listing).encode(), body, {})
            elif path == f"/api/models/{hub.id}":
                files = [{"rfilename": name} for name in hub.files]
                found = {"id": hub.id, "sha": COMMIT, "siblings": files}
                self.send(200, json.dumps(found).encode(), body, {})
            elif (name := path.removeprefix(f"/{hub.id}/resolve/main/")) in hub.files:
                data = hub.files[name]
                self.send(200, data, body, {"ETag": f'"{oid(data)}"', "X-Repo-Commit": COMMIT})
            else:
                self.send(404, b"{}", body, {"X-Error-Code": "RepoNotFound"})

        def send(self, status: int, data: bytes, body: bool, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in (headers | {"Content-Length": str(len(data))}).items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                self.wfile.write(data)

        def log_message(self, *_) -> None:
            pass

    return Handler


def oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
