"""How to run an adapter once it is trained: llama.cpp's command lines, and a Modelfile for Ollama.

Ollama does not run jinja. It recognises some chat templates by their text and writes the prompt of any other as it is,
without roles. So the Modelfile gets a TEMPLATE in Ollama's own language where one is known to give the same text: that
is checked by rendering conversations with the template that was trained with.
"""

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyggtrain.data.chat_template import ChatTemplate
from pyggtrain.data.samples import BadRowError
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.output import OutputFiles

Message = dict[str, str]


@dataclass(frozen=True)
class _Family:
    """A way to write chats.

    Attributes:
        template: in Ollama's language, without the BOS, which Ollama adds itself.
        write: the same in Python, with the start of an answer.
        system: finds the system message that a template adds of its own accord.
    """

    template: str
    write: Callable[[Sequence[Message]], str]
    system: str


def _chatml(messages: Sequence[Message]) -> str:
    turns = [f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages]
    return "".join(turns) + "<|im_start|>assistant\n"


def _llama3(messages: Sequence[Message]) -> str:
    turns = [
        f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n{message['content']}<|eot_id|>"
        for message in messages
    ]
    return "".join(turns) + "<|start_header_id|>assistant<|end_header_id|>\n\n"


_FAMILIES = (
    _Family(
        "{{- range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}<|im_start|>assistant\n",
        _chatml,
        r"<\|im_start\|>system\n(.*?)<\|im_end\|>\n",
    ),
    _Family(
        "{{- range .Messages }}<|start_header_id|>{{ .Role }}<|end_header_id|>\n\n{{ .Content }}<|eot_id|>{{ end }}"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        _llama3,
        r"<\|start_header_id\|>system<\|end_header_id\|>\n\n(.*?)<\|eot_id\|>",
    ),
)

_USER, _ANSWER = {"role": "user", "content": "A question?"}, {"role": "assistant", "content": "An answer."}
_SYSTEM = {"role": "system", "content": "An instruction."}
_PROBES = ([_USER], [_USER, _ANSWER, _USER], [_SYSTEM, _USER], [_SYSTEM, _USER, _ANSWER, _USER])


def serve_lines(config: TrainConfig, files: OutputFiles, *, is_diffusion: bool = False) -> str:
    """Return the shell lines that run the adapter: a server, a chat in a terminal, an Ollama model.

    Args:
        is_diffusion: the model fills in masked tokens. Only llama.cpp's example for such models samples it, and that
            loads no adapter: it is merged before.
    """
    if is_diffusion:
        return serve_command(config, files, is_diffusion=True)
    return "\n".join((serve_command(config, files), chat_command(config, files), ollama_command(files)))


def serve_command(config: TrainConfig, files: OutputFiles, *, is_diffusion: bool = False) -> str:
    """Return the shell line (two with a model that fills in masked tokens) that serves the adapter with llama.cpp."""
    if is_diffusion:
        merged = str(files.adapter.with_name(f"{files.adapter.stem}-merged.gguf"))
        # llama-diffusion-cli fills its ubatch: prompt and answer together.
        options = ["-ub", "512", "--diffusion-steps", "128", "--diffusion-block-length", "32", "-p", "Hello"]
        return "\n".join(
            (
                shlex.join(["pyggtrain", "merge", config.model, str(files.adapter), merged]),
                shlex.join(["llama-diffusion-cli", "-m", merged, *options]),
            )
        )
    return shlex.join(["llama-server", *_options(config, files)])


def chat_command(config: TrainConfig, files: OutputFiles) -> str:
    """Return the shell line that chats with the adapter in a terminal."""
    return shlex.join(["llama-cli", *_options(config, files)])


def ollama_command(files: OutputFiles) -> str:
    """Return the shell line that makes an Ollama model of the Modelfile."""
    return shlex.join(["ollama", "create", files.adapter.stem, "-f", str(files.modelfile)])


def _options(config: TrainConfig, files: OutputFiles) -> list[str]:
    words = ["-m", config.model, "--lora", str(files.adapter)]
    if config.chat_template is not None:
        words += ["--jinja", "--chat-template-file", config.chat_template]
    if config.chat_template_kwargs is not None:
        words += ["--chat-template-kwargs", config.chat_template_kwargs]
    return words


def modelfile(
    base: Sequence[Path],
    files: OutputFiles,
    template: ChatTemplate | None,
    bos_token: str,
    *,
    is_diffusion: bool = False,
) -> str:
    """Return an Ollama Modelfile for base and adapter.

    Args:
        base: the parts of the base file.
        files: of the run.
        template: the chat template that was trained with; None if there is none.
        bos_token: text of the token that begins every text; empty if there is none.
        is_diffusion: the model fills in masked tokens, which Ollama does not do; the file then only says so.
    """
    if is_diffusion:
        return "# Ollama continues texts, and this model fills in masked tokens: it cannot be run there.\n"
    lines = [f"# {ollama_command(files)}", f"FROM {base[0].absolute()}", f"ADAPTER {files.adapter.absolute()}"]
    if len(base) > 1:
        lines.insert(
            0, f"# Ollama reads a model from one file: join the {len(base)} parts with llama-gguf-split --merge."
        )
    if template is not None:
        lines += _template_lines(template, bos_token)
    return "\n".join(lines) + "\n"


def _template_lines(template: ChatTemplate, bos_token: str) -> list[str]:
    rendered = [_rendered(template, probe) for probe in _PROBES]
    for family in _FAMILIES:
        system = _own_system(family, rendered[0], bos_token)
        written = _written(family, system)
        # A BOS that the template writes is the one that Ollama adds.
        if rendered in (written, [bos_token + text for text in written]):
            lines = [f'TEMPLATE """{family.template}"""']
            return lines if system is None else [*lines, f'SYSTEM """{system}"""']
    return [
        "# No TEMPLATE in Ollama's language is known to be the same as the chat template that was trained with.",
        "# Ollama recognises some templates inside GGUF files: look at `ollama show --template`. If that shows nothing",
        "# but {{ .Prompt }}, roles are lost: write a TEMPLATE, or serve with llama-server.",
    ]


def _own_system(family: _Family, rendered: str | None, bos_token: str) -> str | None:
    found = re.match(f"(?:{re.escape(bos_token)})?{family.system}", rendered or "", re.DOTALL)
    return found[1] if found and '"""' not in found[1] else None


def _written(family: _Family, system: str | None) -> list[str]:
    # The Modelfile's SYSTEM is the first message where a conversation has none of its own.
    default = [] if system is None else [{"role": "system", "content": system}]
    return [family.write(probe if probe[0]["role"] == "system" else [*default, *probe]) for probe in _PROBES]


def _rendered(template: ChatTemplate, messages: Sequence[Message]) -> str | None:
    """The prompt; None if the template refuses these messages."""
    try:
        return template.render([dict(message) for message in messages], add_generation_prompt=True).text
    except BadRowError:
        return None
