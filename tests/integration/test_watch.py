"""`fly report --watch`: what a running run shows, what it shows at its end, and to whom."""

import http.client
import json
import socket
import threading

import pytest

from fly.analysis.html import write
from fly.cli import watch
from fly.runs import manifest, unfinished
from fly.runs.records import Counts, zero_seconds
from tests import written_runs
from tests.integration.test_cli import run


def record(doc_id, text="an answer"):
    counts = Counts(rounds=3, drafted=9, native_accepted=6, corrections=3, emitted=9)
    seconds = {**zero_seconds(), "draft": 0.5, "verify": 0.5}
    return {
        "task": "sums", "doc_id": doc_id, "idx": 0, "repeat": 0, "text": text,
        "prompt_hash": f"p{doc_id}", "doc_hash": f"d{doc_id}", **counts.as_dict(),
        "prompt_tokens": 4, "prompt_tokens_reused": 0, "seconds": seconds, "positions":
        {"drafted": [], "reached": [], "accepted": []},
    }  # fmt: skip


@pytest.fixture
def going(tmp_path):
    """A run with three finished requests, and a fourth whose line is half written."""
    folder = tmp_path / "out"
    folder.mkdir()
    own = manifest.Manifest.create(folder, {"output_path": str(folder), "model_args": {}})
    own.release()
    path = folder / f"fly_requests_{own.started}.jsonl"
    path.write_text("".join(json.dumps(record(i)) + "\n" for i in range(3)) + '{"task": "su')
    return folder


@pytest.fixture
def ask():
    """GET of a served page: (status, headers, body)."""
    servers = []

    def start(folder, page):
        server = watch.server(folder, page, 0)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def get(path="/", host=None, method="GET"):
            connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1])
            connection.request(method, path, headers={"Host": host} if host else {})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()

        return get

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_what_has_been_finished_is_shown(going, ask):
    """The report's own page: outputs, tau and seconds of the requests that ended."""
    found = unfinished.read(going)
    assert found.entry["stats"]["tau"] == 3.0
    get = ask(going, lambda: (write.page([unfinished.read(going)]), False))
    status, headers, body = get()
    assert (status, headers["Refresh"]) == (200, "10")
    assert body.count(b"an answer") >= 3
    assert b'"requests":3' in body
    path = next(going.glob("fly_requests_*"))
    path.write_text(path.read_text().rpartition("\n")[0] + "\n" + json.dumps(record(3)) + "\n")
    assert b'"requests":4' in get()[2]


def test_a_run_that_has_ended_is_not_asked_for_again(tmp_path, ask):
    folder = written_runs.write(tmp_path / "a", "fly", [1.0])
    assert unfinished.read(folder) is None
    get = ask(folder, lambda: (b"<p>done", True))
    assert "Refresh" not in get()[1]


def test_only_this_machine_and_this_page(going, ask):
    """Another site whose name leads to this machine, another path, another method."""
    get = ask(going, lambda: (b"page", False))
    assert get(host="evil.example")[0] == 403
    assert get("/../../etc/passwd")[0] == 404
    assert get(method="POST")[0] == 501
    assert get("/?x")[0] == 200


def test_it_listens_on_loopback_alone(going):
    server = watch.server(going, lambda: (b"", True), 0)
    assert server.socket.getsockname()[0] == "127.0.0.1"
    server.server_close()


def test_bad_usage(tmp_path, capsys):
    assert run("report", "--watch", tmp_path / "none") == 2
    assert "no such folder" in capsys.readouterr().err
    assert run("report") == 2
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert run("report", "--watch", tmp_path, "--port", taken.getsockname()[1]) == 2
    assert "cannot be used" in capsys.readouterr().err
    assert run("report", "--watch", tmp_path, "--port", "99999") == 2
    assert "--port 99999: cannot be used: bind(): port must be" in capsys.readouterr().err
