"""Fixtures of the data tests: tokenizers and chat templates out of the pinned llama.cpp tree, if it is in the cache."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pyggtrain.cache_folder import cache_folder
from pyggtrain.data.chat_template import ChatTemplate
from pyggtrain.gguf import Tokenizer

# Before the tests' own cache folder takes its place.
BUILD_CACHE = cache_folder()

# Mistral's first instruct template: no system role, roles must alternate, a space before each answer.
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(smollm2_path)


@pytest.fixture(scope="session")
def llama_cpp_models() -> Path:
    """`models/` of the llama.cpp source that the bridge was built from."""
    found = sorted(BUILD_CACHE.glob("llama.cpp-*/source/vendor/llama.cpp/models"))
    if not found:
        pytest.skip("no unpacked llama.cpp source in the cache")
    return found[-1]


@pytest.fixture(scope="session")
def vocabulary(llama_cpp_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tokenizer]:
    """Tokenizer of `ggml-vocab-<name>.gguf`."""
    folder = tmp_path_factory.mktemp("vocabularies")
    opened: dict[str, Tokenizer] = {}

    def open_vocabulary(name: str) -> Tokenizer:
        if name not in opened:
            data = (llama_cpp_models / f"ggml-vocab-{name}.gguf").read_bytes()
            path = folder / f"{name}.gguf"
            # These files have no tensors and end without the padding that would come before them.
            path.write_bytes(data + bytes(-len(data) % 32))
            opened[name] = Tokenizer.from_gguf(path)
        return opened[name]

    return open_vocabulary


@pytest.fixture(scope="session")
def template_source(llama_cpp_models: Path) -> Callable[[str], str]:
    """Source of a template by the name of its file in llama.cpp; `mistral` and `chatml` are written out above."""

    def read(name: str) -> str:
        own = {"mistral": MISTRAL, "chatml": CHATML}
        return own.get(name) or (llama_cpp_models / "templates" / f"{name}.jinja").read_text(encoding="utf-8")

    return read


@pytest.fixture(scope="session")
def template_of(template_source: Callable[[str], str]) -> Callable[[Tokenizer, str], ChatTemplate]:
    return lambda tokenizer, name: ChatTemplate.of_model(tokenizer, source=template_source(name))
