# ruff: noqa: RUF001 - DeepSeek and Tencent write their tokens with full-width bars
"""Masks with every chat template of llama.cpp's tree, over a vocabulary that has its control tokens."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pyggtrain.data import ChatTemplate, DataSettings, Example, load_examples
from pyggtrain.errors import DataError
from pyggtrain.gguf import GGUFFile, Tokenizer, TypedValue, typed_metadata, write_gguf

# The token that ends a turn where llama.cpp knows it by the model file's eot_token_id, not by its text.
ENDS = {
    "Apertus-8B-Instruct": "<|assistant_end|>",
    "Apriel-1.6-15b-Thinker-fixed": "<|end|>",
    "ByteDance-Seed-OSS": "<seed:eos>",
    "Cohere2MoE": "<|END_OF_TURN_TOKEN|>",
    "CohereForAI-c4ai-command-r-plus-tool_use": "<|END_OF_TURN_TOKEN|>",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "<|END_OF_TURN_TOKEN|>",
    "GLM-4.6": "<|user|>",
    "GLM-4.7-Flash": "<|user|>",
    "GigaChat3-10B-A1.8B": "<|message_sep|>",
    "GigaChat3.1-10B-A1.8B": "<|message_sep|>",
    "Kimi-K3": "<|end_of_msg|>",
    "MiniMax-M1": "<end_of_sentence>",
    "MiniMax-M2": "[e~[",
    "MiniMax-M3": "[e~[",
    "NVIDIA-Nemotron-Nano-v2": "<SPECIAL_12>",
    "Reka-Edge": "<sep>",
    "google-gemma-2-2b-it": "<end_of_turn>",
    "inclusionai-ling-3.0-flash": "<|role_end|>",
    "microsoft-Phi-3.5-mini-instruct": "<|end|>",
    "muse-glimmer": "<|eot|>",
    "poolside-Laguna-S-2.1": "</assistant>",
    "poolside-Laguna-XS-2.1": "</assistant>",
    "poolside-Laguna-XS.2": "</assistant>",
    "tencent-Hy3": "<｜hy_eos:opensource｜>",
    "upstage-Solar-Open-100B": "<|end|>",
}
CONTROL = re.compile(r"<[|｜][^<>{}'\"\s]{1,40}[|｜]>|<[a-z_]+\|>|<\|[a-z_]+>")
CHAT = [
    {"role": "user", "content": "QUESTION1"},
    {"role": "assistant", "content": "ANSWER1"},
    {"role": "user", "content": "QUESTION2"},
    {"role": "assistant", "content": "ANSWER2"},
]


def learnt_spans(example: Example, tokenizer: Tokenizer) -> list[list[int]]:
    spans: list[list[int]] = [[]]
    for label in [*example.labels, -100]:
        if label != -100:
            spans[-1].append(label)
        elif spans[-1]:
            spans.append([])
    return spans[:-1]


@pytest.fixture
def vocabulary_of(smollm2: GGUFFile, tmp_path: Path) -> Callable[[Path], Tokenizer]:
    """vocabulary_of(template): SmolLM2's vocabulary with the control tokens of that template, its end of turn named."""
    metadata = typed_metadata(smollm2)
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]

    def write(template: Path) -> Tokenizer:
        end = ENDS.get(template.stem)
        texts = {*CONTROL.findall(template.read_text(encoding="utf-8")), *([] if end is None else [end])}
        new = sorted(texts - set(tokens.value))
        all_tokens = [*tokens.value, *new]
        own = {
            "tokenizer.ggml.tokens": TypedValue(tokens.type, all_tokens),
            # 3 is a control token.
            "tokenizer.ggml.token_type": TypedValue(types.type, [*types.value, *[3] * len(new)]),
        }
        if end is not None:
            own["tokenizer.ggml.eot_token_id"] = TypedValue("u32", all_tokens.index(end))
        path = tmp_path / "vocabulary.gguf"
        write_gguf(path, {**metadata, **own}, [])
        return Tokenizer.from_gguf(path)

    return write


@pytest.mark.slow
def test_answers_and_their_end_are_learnt_with_every_template(
    vocabulary_of: Callable[[Path], Tokenizer], llama_cpp_models: Path
) -> None:
    refused, without_end = [], {}
    paths = sorted((llama_cpp_models / "templates").glob("*.jinja"))
    assert len(paths) > 60
    for path in paths:
        tokenizer = vocabulary_of(path)
        template = ChatTemplate.of_model(tokenizer, source=path.read_text(encoding="utf-8"))
        try:
            (example,), report = load_examples([{"messages": CHAT}], tokenizer, DataSettings(), chat_template=template)
        except DataError:
            refused.append(path.stem)
            continue
        spans = learnt_spans(example, tokenizer)
        texts = [b"".join(map(tokenizer.piece, span)).decode() for span in spans]
        assert len(spans) == 2, (path.stem, texts)
        assert "ANSWER1" in texts[0] and "ANSWER2" in texts[1] and "QUESTION" not in "".join(texts), (path.stem, texts)
        missing = [
            text for text, span in zip(texts, spans, strict=True) if not tokenizer.is_end_of_generation(span[-1])
        ]
        if missing:
            without_end[path.stem] = missing
            assert any("no end-of-generation token" in warning for warning in report.warnings), path.stem
    # It uses a variable that nobody gives.
    assert refused == ["fireworks-ai-llama-3-firefunction-v2"]
    # RWKV ends a turn with an empty line, and <|end|> of gpt-oss ends a message but not the generation.
    assert list(without_end) == ["llama-cpp-rwkv-world", "openai-gpt-oss-120b"], without_end
