"""An OpenAI-compatible server that answers by rote and plays faults, for tests of --model server.

Every answer follows from its prompt, so that runs with and without faults have the same texts.
`python -m tests.fault_server PORT` serves without faults, in a process of its own.
"""

import contextlib
import hashlib
import json
import random
import socket
import socketserver
import struct
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PASSING = ("429", "429-later", "500", "503", "refuse", "drop", "stall", "unfinished", "in-stream")
PROBE = 4  # requests for so few tokens are probes, which faults spare
DRAFT = 3  # tokens


def answer_of(prompt: str, most: int = 10**9) -> list[str]:
    """A text in tokens: 3 to 12 short words."""
    rng = random.Random(hashlib.sha256(prompt.encode()).hexdigest())
    return [f"{rng.choice('abcdefgh')}{rng.randrange(10)} " for _ in range(rng.randint(3, 12))][
        :most
    ]


def score_of(ids, number):
    """The log-probability of one of a prompt's tokens, by all up to it."""
    rng = random.Random(repr(ids[: number + 1]))
    return -rng.choice([0.1, 1.5, 3.0])


class FaultServer(ThreadingHTTPServer):
    """kind: what it speaks as: llama.cpp, vllm, sglang, or plain. faults: one for each request that
    is no probe, in the order of their coming; None is no fault."""

    daemon_threads = True
    request_queue_size = 256
    allow_reuse_address = True

    def __init__(self, kind="llama.cpp", faults=(), port=0, **settings):
        super().__init__(("127.0.0.1", port), _Handler)
        self.kind, self.faults, self.lock = kind, list(faults), threading.Lock()
        self.model, self.context, self.drafts = "tiny", 512, True
        self.delay = self.extra_tokens = 0  # seconds per token; tokens that texts get before them
        self.refused, self.echoes, self.key = set(), True, None
        self.most_stops = 10**9
        self.scores = score_of  # log-probability of a prompt's token; None: `echo` is ignored
        self.asked, self.answered, self.headers = Counter(), Counter(), []
        self.under_way = self.most_under_way = 0
        self.accepted = self.drafted = self.draft_rounds = 0
        self.bodies, self.played, self.at_request = [], [], None
        for name, value in settings.items():
            assert hasattr(self, name), name
            setattr(self, name, value)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address):
        pass  # clients that a test kills


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def _json(self, value, status=200, **headers):
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        server = self.server
        owner = {"llama.cpp": "llamacpp"}.get(server.kind, server.kind)
        entry = {"id": server.model, "owned_by": owner, "created": int(time.time() * 1e6)}
        if server.kind == "vllm":
            entry["max_model_len"] = server.context
        pages = {"/v1/models": {"object": "list", "data": [entry]}}
        if server.kind == "llama.cpp":
            settings = {"n_ctx": server.context}
            pages["/props"] = {"build_info": "b1", "default_generation_settings": settings}
        if server.kind == "vllm":
            pages["/version"] = {"version": "0.99"}
        if server.kind in ("vllm", "llama.cpp") and self.path == "/metrics":
            per_position = f'_per_pos_total{{position="0"}} {server.accepted}\n'
            lines = {
                "drafts": server.draft_rounds,
                "draft_tokens": server.drafted,
                "accepted_tokens": server.accepted,
            }
            name = f"{owner}:spec_decode_num_"
            labels = '{engine="0"}' if server.kind == "vllm" else ""
            text = "".join(f"{name}{key}_total{labels} {n}\n" for key, n in lines.items())
            self._json((f"# HELP x\n{text}{name}accepted_tokens{per_position}").encode())
        elif self.path in pages:
            self._json(pages[self.path])
        else:
            self._json({"error": {"message": "no such page"}}, 404)

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.under_way += 1
            server.most_under_way = max(server.most_under_way, server.under_way)
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._answer(body)
        finally:
            with server.lock:
                server.under_way -= 1

    def _refuse(self, status, message, **headers):
        self._json({"error": {"message": message, "code": status}}, status, **headers)

    def _answer(self, body):
        server = self.server
        server.headers.append(dict(self.headers))
        is_chat = self.path.endswith("/chat/completions")
        prompt = json.dumps(body["messages"]) if is_chat else body["prompt"]
        if isinstance(prompt, list) and isinstance(prompt[0], str):  # lm-eval's own client
            (prompt,) = prompt
        if isinstance(prompt, list):
            prompt, read = json.dumps(prompt), len(prompt)
        else:
            read = len(prompt.encode()) + server.extra_tokens
        if server.key and self.headers["Authorization"] != f"Bearer {server.key}":
            self._refuse(401, f"Incorrect API key: {self.headers['Authorization']}")
            return
        for name in server.refused & {*body}:
            self._refuse(400, f"Unrecognized request argument: {name}")
            return
        if len(body.get("stop") or ()) > server.most_stops:
            self._refuse(400, "body.stop: List should have at most 4 items after validation, not 5")
            return
        if body["model"] != server.model:
            self._refuse(404, f"The model {body['model']} does not exist")
            return
        most, fault = body["max_tokens"], None
        if most > PROBE:
            with server.lock:
                server.bodies.append(body)
                server.asked[prompt] += 1
                fault = server.faults.pop(0) if server.faults else None
                server.played.append(fault)
            if server.at_request:
                server.at_request(server)
        later = {"429": ("Retry-After", "0"), "429-later": ("Retry-After", "0.3")}
        if fault in later:
            self._refuse(429, "slow down", Retry_After=later[fault][1])
        elif fault in ("400", "500", "503"):
            self._refuse(int(fault), "played")
        elif fault == "refuse":
            self._reset()
        else:
            self._stream(body, prompt, read, is_chat, fault)

    def _reset(self):
        """Close the connection at once, without an answer."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def _stream(self, body, prompt, read, is_chat, fault):
        server, most = self.server, body["max_tokens"]
        tokens, finish = answer_of(prompt), "stop"
        if len(tokens) > most:
            tokens, finish = tokens[:most], "length"
        if fault == "cut":
            tokens, finish = tokens[:2], "length"
        if fault == "filter":
            finish = "content_filter"
        if not body.get("stream"):
            whole = {"index": 0, "text": "".join(tokens), "finish_reason": finish}
            if body.get("echo") and server.scores:
                ids = body["prompt"]
                found = [None, *(server.scores(ids, i) for i in range(1, len(ids))), -1.0]
                best = [None, *({"it": score, "best": -0.1} for score in found[1:])]
                whole["logprobs"] = {"token_logprobs": found, "top_logprobs": best}
            self._json({**self._frame(), "choices": [whole], **self._tell(tokens, read)})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if server.kind == "vllm":
            self._event(self._chunk(is_chat, ""))
        for number, token in enumerate(tokens):
            time.sleep(server.delay)
            if number == 1 and fault == "drop":
                self.wfile.flush()
                self._reset()
                return
            if number == 1 and fault == "stall":
                time.sleep(3)
            if number == 1 and fault == "in-stream":
                self._event({"error": {"message": "played", "code": 500}})
                self._end()
                return
            self._event(self._chunk(is_chat, token))
        if fault != "unfinished":
            self._event(self._chunk(is_chat, "", finish))
            self._event({**self._frame(), "choices": [], **self._tell(tokens, read)})
        self.wfile.write(b"e\r\ndata: [DONE]\n\n\r\n")
        self._end()
        if fault != "unfinished" and most > PROBE:
            with server.lock:
                server.answered[prompt] += 1

    def _tell(self, tokens, read):
        """Usage, and what each kind tells of speculation: of 3 drafted a round, 2 are accepted."""
        server = self.server
        usage = {"prompt_tokens": read, "completion_tokens": len(tokens)}
        found = {"usage": {**usage, "total_tokens": sum(usage.values())}}
        rounds = len(tokens) // 3
        drafted, accepted = DRAFT * rounds, 2 * rounds
        with server.lock:
            server.drafted += drafted
            server.accepted += accepted
            server.draft_rounds += rounds
        if server.kind == "llama.cpp":
            found["timings"] = {"prompt_ms": 1.5, "predicted_n": len(tokens), "predicted_ms": 2.0}
            if server.drafts:
                found["timings"] |= {"draft_n": drafted, "draft_n_accepted": accepted}
        if server.kind == "vllm" and server.drafts:
            found["metrics"] = {
                "speculative_decoding": {
                    "num_draft_tokens": drafted,
                    "num_accepted_draft_tokens": accepted,
                    "per_step_drafted": [DRAFT] * rounds,
                    "per_step_accepted": [2] * rounds,
                }
            }
        if server.kind == "sglang":
            details = {
                "spec_verify_ct": rounds,
                "spec_num_proposed_drafts": drafted,
                "spec_num_correct_drafts": accepted,
                "spec_correct_drafts_histogram": [0, 0, rounds, 0],
            }
            found["sglext"] = {"spec_tokens_details": details}
        return found

    def _frame(self):
        name = self.server.model if self.server.echoes else "another"
        return {"id": "x", "object": "c", "created": 0, "model": name, "system_fingerprint": "b1"}

    def _chunk(self, is_chat, text, finish=None):
        choice = {"index": 0, "finish_reason": finish}
        choice |= {"delta": {"content": text}} if is_chat else {"text": text}
        return {**self._frame(), "choices": [choice]}

    def _event(self, value):
        data = f"data: {json.dumps(value)}\n\n".encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _end(self):
        self.wfile.write(b"0\r\n\r\n")


if __name__ == "__main__":
    socketserver.TCPServer.allow_reuse_address = True
    with FaultServer(port=int(sys.argv[1])) as running:
        print(running.url, flush=True)
        threading.Event().wait()
