"""A stand-in for the Hugging Face hub on this machine, with a small GPT-2 and a small WikiText.

The weights are random and the text is from Python's own documentation; names, files and error codes
are those that the clients of the hub expect. A repository has one revision, "main". A client with
the token TOKEN may create model repositories and commit to them.
"""

import base64
import contextlib
import hashlib
import json
import re
import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from pydoc_data.topics import topics
from urllib.parse import parse_qs, unquote, urlsplit

GPT2, WIKITEXT = "openai-community/gpt2", "Salesforce/wikitext"
OLD_NAMES = {
    **{"models/gpt2": f"models/{GPT2}", "models/gpt2-xl": f"models/{GPT2}-xl"},
    "datasets/wikitext": f"datasets/{WIKITEXT}",
}
CONFIG = "wikitext-2-raw-v1"
ARTICLES = {"test": 8, "validation": 12, "train": 40}
USER, TOKEN = "somebody", "hf_" + "Secret" * 6

# ------------------------------------------------------------------------------ what the hub serves


def write_gpt2(folder: Path) -> None:
    """Save a GPT-2 of 2 layers and a tokenizer of 1,000 entries.

    As in the hub's file, the weights' names lack "transformer." and the tied head is left out.
    """
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    tokenizer, end = ByteLevelBPETokenizer(), "<|endoftext|>"
    texts = [topics[name] for name in sorted(topics)]
    tokenizer.train_from_iterator(texts, vocab_size=1000, special_tokens=[end], show_progress=False)
    options = {"eos_token": end, "bos_token": end, "model_max_length": 1024}
    options["chat_template"] = "{% for message in messages %}{{ message.content }}{% endfor %}"
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, **options)
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_layer=2, n_embd=128, n_head=4, **ends))
    model.transformer.save_pretrained(folder)
    model.config.architectures = ["GPT2LMHeadModel"]
    model.config.save_pretrained(folder)


def rows_of(name: str) -> list[str]:
    """A topic as an article of WikiText: a row for each line, and empty rows around headings."""
    paragraphs = [" ".join(text.split()) for text in topics[name].split("\n\n")]
    lines = [f" {paragraph} \n" for paragraph in paragraphs if paragraph]
    return ["", f" = {name} = \n", "", *lines[:1], "", " = = More = = \n", "", *lines[1:]]


def write_wikitext(folder: Path, *more: str) -> None:
    """Save the three splits of ARTICLES as Parquet files, and the README that names them.

    Args:
        more: configurations besides CONFIG, with the same articles.
    """
    import pyarrow
    import pyarrow.parquet

    header = "configs:\n"
    for config in (CONFIG, *more):
        (folder / config).mkdir(parents=True)
        names, files = iter(sorted(topics)), []
        for split, number in ARTICLES.items():
            rows = [row for _ in range(number) for row in rows_of(next(names))]
            file = f"{config}/{split}-00000-of-00001.parquet"
            pyarrow.parquet.write_table(pyarrow.table({"text": rows}), folder / file)
            files.append(f"  - split: {split}\n    path: {config}/{split}-*\n")
        header += f"- config_name: {config}\n  data_files:\n{''.join(files)}"
    (folder / "README.md").write_text(f"---\n{header}---\n")


def write_repositories(root: Path) -> None:
    """Save everything that a Hub serves."""
    (root / "models" / GPT2).mkdir(parents=True)
    write_gpt2(root / "models" / GPT2)
    write_wikitext(root / "datasets" / WIKITEXT)


# -------------------------------------------------------------------------------------- the server


class Repository:
    """The files of a model or a dataset: what a listing says of each path, and the only commit."""

    def __init__(self, folder: Path):
        self.folder, self.entries = folder, {}
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            path, content = file.relative_to(folder).as_posix(), file.read_bytes()
            digest = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            entry = {"type": "file", "path": path, "size": len(content), "oid": digest}
            self.entries[path] = entry
        self.commit = hashlib.sha1(json.dumps(self.entries).encode()).hexdigest()
        for parent in {str(up) for path in self.entries for up in Path(path).parents} - {"."}:
            entry = {"type": "directory", "path": parent, "size": 0, "oid": self.commit}
            self.entries[parent] = entry

    def list(self, top: str, recursive: bool) -> list[dict]:
        """The entries below a folder ("" for all)."""
        below = f"{top}/" if top else ""
        paths = sorted(path for path in self.entries if path.startswith(below))
        return [self.entries[p] for p in paths if recursive or "/" not in p[len(below) :]]


class Hub(ThreadingHTTPServer):
    """Serves the folder that write_repositories has written.

    Attributes:
        url: for HF_ENDPOINT.
        pushed: what clients committed: repository -> {path: content}.
        private: the names of the private ones of these repositories.
        read_only: the names of those that the token may only read.
    """

    daemon_threads = True
    request_queue_size = 128  # several ranks ask at once

    def __init__(self, root: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.pushed: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.read_only: set[str] = set()
        self.repositories = {
            folder.relative_to(root).as_posix(): Repository(folder) for folder in root.glob("*/*/*")
        }

    def server_bind(self) -> None:
        """Bind without HTTPServer's reverse look-up of the name, which may hang."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]

    def close(self) -> None:
        """Stop the server; has no effect the second time."""
        self.shutdown()
        self.server_close()


@contextlib.contextmanager
def serving(root: Path) -> Iterator[Hub]:
    """Yield a Hub that answers in a thread, and close it at the end."""
    hub = Hub(root)
    threading.Thread(target=hub.serve_forever, args=[0.02], daemon=True).start()
    try:
        yield hub
    finally:
        hub.close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else an answer waits 40 ms for an acknowledgement
    # /api/models/ID, /api/models/ID/VERB/REVISION/PATH
    ABOUT = re.compile(
        r"/api/(?P<kind>models|datasets)/(?P<id>[\w.-]+(?:/(?!(?:revision|tree|paths-info)/)[\w.-]+)?)"
        r"(?:/(?P<verb>revision|tree|paths-info)/(?P<revision>[^/]+)/?(?P<path>.*))?"
    )
    # /ID/resolve/REVISION/PATH for a model, /datasets/ID/resolve/REVISION/PATH
    FILE = re.compile(
        r"/(?P<kind>datasets/)?(?P<id>[\w.-]+(?:/[\w.-]+)?)/(?P<verb>resolve)/(?P<revision>[^/]+)/(?P<path>.*)"
    )

    def do_GET(self) -> None:
        body, url = self.read_body(), urlsplit(self.path)
        path = unquote(url.path)
        if path == "/api/whoami-v2":
            if not self.knows_token():
                return self.fail(401, "Unauthorized")
            return self.answer_json({"type": "user", "name": USER, "orgs": []})
        asked = self.ABOUT.fullmatch(path) or self.FILE.fullmatch(path)
        if asked is None:
            return self.fail(404, "EntryNotFound")
        name = f"{(asked['kind'] or 'models').strip('/')}/{asked['id']}"
        name = OLD_NAMES.get(name, name)
        if asked["id"] in self.server.pushed and asked["verb"] in (None, "revision"):
            private = asked["id"] in self.server.private
            return self.answer_json({"id": asked["id"], "private": private, "tags": []})
        repository = self.server.repositories.get(name)
        if repository is None:
            return self.fail(401, "RepoNotFound")  # as for a private one
        if asked["revision"] not in (None, "main", repository.commit):
            return self.fail(404, "RevisionNotFound")
        entries = repository.entries
        if asked["verb"] == "resolve":
            return self.send(repository, asked["path"])
        if asked["verb"] == "tree":
            recursive = "recursive=true" in url.query.lower()
            return self.answer_json(repository.list(asked["path"], recursive))
        if asked["verb"] == "paths-info":
            paths = parse_qs(body).get("paths", [])
            return self.answer_json([entries[path] for path in paths if path in entries])
        files = [{"rfilename": path} for path in entries if entries[path]["type"] == "file"]
        repository_id = name.partition("/")[2]
        self.answer_json({"id": repository_id, "sha": repository.commit, "siblings": files})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Creating a repository, and a commit: a line of JSON for each file, in base64."""
        path, server = urlsplit(self.path).path, self.server
        if path == "/api/validate-yaml":  # of a model card
            self.read_body()
            return self.answer_json({"errors": [], "warnings": []})
        write = re.fullmatch(r"/api/(?:repos/create|models/(.+)/(preupload|commit)/main)", path)
        if write is None:
            return self.do_GET()
        body = self.read_body()
        if not self.knows_token():
            return self.fail(403, "Forbidden")
        if write[1] in server.read_only:
            return self.fail(403, "Forbidden")
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or USER}/{asked['name']}"
            if name not in server.pushed:  # the hub does not change one that exists
                server.pushed[name] = {}
                if asked.get("private") or asked.get("visibility") == "private":
                    server.private.add(name)
            return self.answer_json({"url": f"{server.url}/{name}", "name": name})
        if write[2] == "preupload":
            mode = {"uploadMode": "regular", "shouldIgnore": False}
            files = [mode | {"path": file["path"]} for file in json.loads(body)["files"]]
            return self.answer_json({"files": files})
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                content = base64.b64decode(line["value"]["content"])
                server.pushed[write[1]][line["value"]["path"]] = content
        commit = hashlib.sha1(body.encode()).hexdigest()
        url = f"{server.url}/{write[1]}/commit/{commit}"
        self.answer_json({"success": True, "commitOid": commit, "commitUrl": url})

    def read_body(self) -> str:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()

    def knows_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def send(self, repository: Repository, path: str) -> None:
        """A file, or the part that a Range header asks for."""
        entry = repository.entries.get(path, {"type": "none"})
        headers = {"X-Repo-Commit": repository.commit}
        if entry["type"] != "file":
            return self.fail(404, "EntryNotFound", **headers)
        headers |= {"ETag": f'"{entry["oid"]}"', "Accept-Ranges": "bytes"}
        content, code = (repository.folder / path).read_bytes(), 200
        if part := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(part[1]), min(int(part[2] or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            content, code = content[first : last + 1], 206
        self.answer(code, content, **headers)

    def fail(self, code: int, error: str, **headers) -> None:
        """`error` is what the client makes its exception of."""
        self.answer(code, b"{}", **headers, **{"X-Error-Code": error, "X-Error-Message": error})

    def answer_json(self, found) -> None:
        self.answer(200, json.dumps(found).encode(), **{"Content-Type": "application/json"})

    def answer(self, code: int, body: bytes, **headers) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": len(body)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_) -> None:
        pass
