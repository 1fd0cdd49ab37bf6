"""A running llama-server as a runtime: the very process that will serve the adapter, whatever its build and hardware.

Over HTTP a server shows the next token's probabilities, never the logits of a whole text, so each compared position
costs one request and the answer is a row of log-probabilities. `ServerRuntime.limits` says what that leaves unproven.
"""

import json
import math
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from pyggtrain.errors import AdapterError, BridgeError, ConfigError, UnsupportedError

# A full row of probabilities takes about 110 bytes of JSON per token of the vocabulary: 30 MB for 262,144 tokens.
MAX_RESPONSE_BYTES = 512 * 2**20

# Greedy decoding whatever sampling defaults the server was started with: no penalties, only the largest logit survives.
GREEDY = {"samplers": ["top_k"], "top_k": 1}


class ServerRuntime:
    """A llama-server that was started with the base model and, to compare an adapter, with `--lora adapter.gguf`.

    Args:
        url: Where it listens, `http://127.0.0.1:8080`; a path prefix (`--api-prefix`) is kept.
        timeout_s: Longest wait for one answer, in seconds.

    Raises:
        ConfigError: Nothing answers at `url`, or something that is not llama-server.
    """

    gives_log_probs = True

    def __init__(self, url: str, *, timeout_s: float = 600.0) -> None:
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise ConfigError(f"{url!r} is no address of a llama-server. Needed: one like http://127.0.0.1:8080.")
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        # A proxy named by the environment is for the outside world; a server on this machine is not behind it.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._adapter_id: int | None = None
        try:
            self._props = self._request("/props")
            (model,) = self._request("/v1/models")["data"]
            self.num_tokens = int(model["meta"]["n_vocab"])
            self.build = str(self._props["build_info"])
            self.model_path = str(self._props["model_path"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{url} answers, but not as llama-server does: /props or /v1/models lacks {error}. Needed: a server "
                f"with one loaded model; start it with `llama-server -m model.gguf --lora adapter.gguf`."
            ) from error

    @property
    def name(self) -> str:
        return f"llama-server {self.build} at {self._url} with {Path(self.model_path).name}"

    @property
    def limits(self) -> tuple[str, ...]:
        return (
            "llama-server shows log-probabilities of the next token, not logits: differences are of log-probabilities.",
            "llama-server shows no tensors of the graph: a difference cannot be traced to a layer.",
            "llama-server does not say how many pairs of an adapter it uses.",
            "llama-server does not say what its files hold: only the adapter's file name was compared.",
        )

    def load_adapter(self, path: Path) -> int:
        """Find the adapter among those that the server was started with; they cannot be loaded later.

        Returns:
            0: a server does not tell the number of pairs.

        Raises:
            AdapterError: No adapter, or more than one, of that file name.
        """
        loaded = self.adapters()
        ids = [entry["id"] for entry in loaded if Path(entry["path"]).name == path.name]
        if len(ids) != 1:
            names = ", ".join(Path(entry["path"]).name for entry in loaded) or "none"
            raise AdapterError(
                f"{path.name}: {self._url} holds {len(ids)} adapters of that name (loaded: {names}), needed one. "
                f"llama-server loads adapters only at its start: start it again with `--lora {path}`."
            )
        self._adapter_id = ids[0]
        return 0

    def logits(
        self, tokens: Sequence[int], *, scale: float | None = None, positions: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Log-probabilities [P, V] float32 of the token after each position; one request a position."""
        rows: list[torch.Tensor] = []
        for position in range(len(tokens)) if positions is None else positions:
            # The first request forgets what the slot held, so that equal calls compute equal bits; the rest extend it.
            prefix, keep_cache = tokens[: position + 1], bool(rows)
            answer = self._complete(prefix, 1, scale, num_probs=self.num_tokens, cache_prompt=keep_cache)
            rows.append(self._log_prob_row(answer))
        return torch.stack(rows)

    def tensors(
        self, tokens: Sequence[int], names: Collection[str], *, scale: float | None = None
    ) -> dict[str, torch.Tensor]:
        raise UnsupportedError(
            f"{self._url}: a running llama-server shows no tensors of its graph; {', '.join(sorted(names))} asked for. "
            f"Use the llama.cpp inside the bridge for this."
        )

    def generate(self, tokens: Sequence[int], max_new_tokens: int, *, scale: float | None = None) -> list[int]:
        answer = self._complete(tokens, max_new_tokens, scale, num_probs=0, cache_prompt=False)
        ids = [int(id) for id in answer["tokens"]]
        # The token that ended the generation has no text, but llama-server lists it.
        return ids[:-1] if answer["stop_type"] == "eos" else ids

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of `text` by the server's own tokenizer."""
        body = {"content": text, "add_special": add_special, "parse_special": parse_special}
        return [int(id) for id in self._request("/tokenize", body)["tokens"]]

    def apply_template(self, messages: Sequence[dict[str, Any]]) -> str:
        """The prompt that the server would make of chat messages, up to where the assistant's answer begins."""
        return str(self._request("/apply-template", {"messages": list(messages)})["prompt"])

    def chat(self, messages: Sequence[dict[str, Any]], max_new_tokens: int, *, scale: float | None = None) -> str:
        """The assistant's greedy answer through /v1/chat/completions."""
        body = {"messages": list(messages), "max_tokens": max_new_tokens, "cache_prompt": False, **GREEDY}
        body["lora"] = self._lora(scale)
        return str(self._request("/v1/chat/completions", body)["choices"][0]["message"]["content"])

    def adapters(self) -> list[dict[str, Any]]:
        """What GET /lora-adapters lists: `id`, `path` and the global `scale` of each adapter."""
        entries = self._request("/lora-adapters")
        assert isinstance(entries, list)
        return entries

    def close(self) -> None:
        """Nothing to free: the server belongs to whoever started it."""

    def _complete(
        self, tokens: Sequence[int], max_new_tokens: int, scale: float | None, *, num_probs: int, cache_prompt: bool
    ) -> dict[str, Any]:
        body = {
            "prompt": list(tokens),
            "n_predict": max_new_tokens,
            "n_probs": num_probs,
            "return_tokens": True,
            "cache_prompt": cache_prompt,
            "id_slot": 0,
            "lora": self._lora(scale),
            **GREEDY,
        }
        answer = self._request("/completion", body)
        assert isinstance(answer, dict)
        if answer.get("truncated"):
            raise BridgeError(
                f"{self._url}: {len(tokens)} tokens do not fit its context. Start it with a larger --ctx-size."
            )
        return answer

    def _lora(self, scale: float | None) -> list[dict[str, float]]:
        if scale is None:
            # An empty list would leave every adapter at the scale that the server was started with.
            return [{"id": entry["id"], "scale": 0.0} for entry in self.adapters()]
        if self._adapter_id is None:
            raise AdapterError(f"A scale of {scale} was asked for, but no adapter is loaded. Call load_adapter first.")
        # Those that are not listed count as 0.
        return [{"id": self._adapter_id, "scale": scale}]

    def _log_prob_row(self, answer: dict[str, Any]) -> torch.Tensor:
        row = torch.full((self.num_tokens,), math.nan)
        entries = answer["completion_probabilities"][0]["top_logprobs"]
        ids = torch.tensor([entry["id"] for entry in entries])
        row[ids] = torch.tensor([entry["logprob"] for entry in entries])
        missing = int(row.isnan().sum())
        if missing:
            raise BridgeError(
                f"{self._url} gave the probabilities of {len(entries)} tokens, needed all {self.num_tokens} of the "
                f"vocabulary. This build ({self.build}) caps n_probs: compare with the bridge's llama.cpp instead."
            )
        # llama-server sums the softmax in float32, which leaves the row off by a shift of up to 1e-3.
        return row.double().log_softmax(dim=0).float()

    def _request(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                text = response.read(MAX_RESPONSE_BYTES + 1)
        except urllib.error.HTTPError as error:
            with error:
                detail = error.read(2000).decode(errors="replace")
            raise BridgeError(f"{self._url}{path}: llama-server refused with status {error.code}: {detail}") from error
        except OSError as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise ConfigError(
                f"{self._url}{path}: no llama-server answers there ({reason}). Start one with "
                f"`llama-server -m model.gguf --lora adapter.gguf`, and give the address it prints."
            ) from error
        if len(text) > MAX_RESPONSE_BYTES:
            raise BridgeError(
                f"{self._url}{path}: the answer is larger than {MAX_RESPONSE_BYTES} bytes: it is no llama-server's."
            )
        try:
            return json.loads(text)
        except ValueError as error:
            raise ConfigError(
                f"{self._url}{path} answers, but not with JSON ({error}): it is no llama-server."
            ) from error
