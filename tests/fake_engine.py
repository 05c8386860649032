"""Stands in for vLLM in the supervisor's tests: `fake_engine.py PORT`.

Like vLLM it has a child that does the work; unlike vLLM's, it left the session, so that only its parent knows it.
Prints `core PID`, then answers /health with 200.
"""

from __future__ import annotations

import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


core = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("core", core.pid, flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
