"""training.serving: command lines that a shell takes, and a Modelfile that is true."""

import shlex
from pathlib import Path

import pytest

from pyggtrain.data.chat_template import ChatTemplate, token_text
from pyggtrain.gguf import Tokenizer
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.output import OutputFiles
from pyggtrain.training.serving import chat_command, modelfile, ollama_command, serve_command

FILES = OutputFiles(Path("out folder/it's.gguf"))
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


def lines(template, bos_token="", base=("model.gguf",)):
    return modelfile([Path(part) for part in base], FILES, template, bos_token).splitlines()


def config(**settings):
    return TrainConfig(model="my model.gguf", data=("rows.jsonl",), output=str(FILES.adapter), **settings)


@pytest.mark.parametrize(("command", "program"), [(serve_command, "llama-server"), (chat_command, "llama-cli")])
def test_commands_survive_a_shell_and_repeat_the_template(command, program):
    words = shlex.split(command(config(), FILES))
    assert words == [program, "-m", "my model.gguf", "--lora", "out folder/it's.gguf"]
    words = shlex.split(command(config(chat_template="t.jinja", chat_template_kwargs='{"a": 1}'), FILES))
    assert words[5:] == ["--jinja", "--chat-template-file", "t.jinja", "--chat-template-kwargs", '{"a": 1}']


def test_ollama_s_command_names_the_modelfile():
    assert shlex.split(ollama_command(FILES)) == ["ollama", "create", "it's", "-f", "out folder/it's.gguf.Modelfile"]


def test_modelfile_names_base_and_adapter_from_anywhere():
    head, base, adapter = lines(None)
    assert head.startswith("# ollama create")
    assert base == f"FROM {Path('model.gguf').absolute()}" and adapter == f"ADAPTER {FILES.adapter.absolute()}"
    assert "join the 2 parts" in lines(None, base=("a-00001-of-00002.gguf", "a-00002-of-00002.gguf"))[0]


def test_chatml_and_llama_3_get_a_template_in_ollama_s_language():
    text = "\n".join(lines(ChatTemplate(CHATML)))
    assert 'TEMPLATE """{{- range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}' in text
    assert "SYSTEM" not in text
    text = "\n".join(lines(ChatTemplate(LLAMA_3, bos_token="<s>"), "<s>"))
    assert 'TEMPLATE """{{- range .Messages }}<|start_header_id|>{{ .Role }}<|end_header_id|>' in text


def test_system_message_that_a_template_adds_becomes_system(smollm2_path):
    tokenizer = Tokenizer.from_gguf(smollm2_path)
    text = "\n".join(lines(ChatTemplate.of_model(tokenizer), token_text(tokenizer, tokenizer.bos_id)))
    assert 'SYSTEM """You are a helpful AI assistant named SmolLM, trained by Hugging Face"""' in text


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace("{{ m.content }}", "{{ m.content | upper }}"),
        CHATML.replace("<|im_end|>\n", "<|im_end|>"),
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n",
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}",
    ],
)
def test_a_template_that_writes_anything_else_gets_none(template):
    text = "\n".join(lines(ChatTemplate(template)))
    assert 'TEMPLATE """' not in text and "# No TEMPLATE" in text
