"""An OCR service that recognises nothing: it answers each document with a fixed text.

python ocr_service.py [PORT]          # on 127.0.0.1; 8752 by default, 0 for a free one
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class OcrRequest(BaseHTTPRequestHandler):
    """POST of a document to /recognise returns {"pages": ["..."]}."""

    def do_POST(self) -> None:
        size = len(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps({"pages": [f"Recognised in {size} bytes"]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def main() -> None:
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8752
    server = ThreadingHTTPServer(("127.0.0.1", port), OcrRequest)
    print(f"Serving at http://127.0.0.1:{server.server_port}/recognise", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
