"""Serves the interface of Google Cloud Storage on the loopback address, for tests.

    python tests/helpers/gcs_emulator.py BUCKET FOLDER

It prints its port, then serves until it is stopped.

The package gcp-storage-emulator stores the objects. This file adds what clients need and the
package lacks: a request can set a condition on an object's generation (its version number), the
response to a read names the generation, and an upload that is cut off stores nothing.
"""

import functools
import http.server
import io
import re
import sys
import typing
import urllib.parse

from gcp_storage_emulator import server
from gcp_storage_emulator.handlers import buckets
from gcp_storage_emulator.storage import Storage


class Handler(server.RequestHandler):
    """Checks the conditions of a request before the emulator answers it."""

    rfile: typing.Any

    def parse_request(self):
        if not super().parse_request():
            return False
        url = urllib.parse.urlparse(self.path)
        query = urllib.parse.parse_qs(url.query)
        _, _, rest = url.path.partition("/b/")
        bucket, _, name = rest.partition("/o")
        name = urllib.parse.unquote(name.removeprefix("/"))
        name = query.get("name", [name])[0]
        body = self.rfile.read(size := int(self.headers.get("Content-Length") or 0))
        if len(body) < size:  # the client stopped during an upload
            return False
        self.rfile = io.BytesIO(body)
        if not name and (found := re.search(rb'"name": "(.*?)"', body[:2000])):
            name = found[1].decode()
        stored = self.storage.objects.get(bucket, {}).get(name)
        self.generation = stored["generation"] if stored else "0"
        self.metageneration = stored["metageneration"] if stored else "0"
        if refusal := self._refusal(query):
            self.send_response(refusal)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return False
        return True

    def _refusal(self, query):
        reads, named = self.command == "GET", query.get("generation", [self.generation])[0]
        if "ifGenerationMatch" in query and query["ifGenerationMatch"][0] != self.generation:
            return 404 if reads and self.generation == "0" else 412
        if "ifGenerationNotMatch" in query and query["ifGenerationNotMatch"][0] == self.generation:
            return 304 if reads else 412
        changed = query.get("ifMetagenerationMatch", [self.metageneration])[0]
        if changed != self.metageneration:
            return 412
        return 404 if named != self.generation else None

    def send_response(self, code, message=None):
        super().send_response(code, message)
        if self.command == "GET" and self.generation != "0":
            self.send_header("x-goog-generation", self.generation)


def main(bucket, folder):
    storage = Storage(data_dir=folder)
    buckets.create_bucket(bucket, storage)
    address = ("127.0.0.1", 0)
    with http.server.HTTPServer(address, functools.partial(Handler, storage)) as httpd:
        print(httpd.server_port, flush=True)
        httpd.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
