"""The child process of `capture`: lets llama.cpp build a file's graphs and writes them to stdout as JSON.

llama.cpp aborts the process where it cannot build a graph, so nothing else runs here. Not meant to be started by hand.
"""

import base64
import json
import sys

from pyggtrain import _bridge
from pyggtrain.child_memory import limit_memory
from pyggtrain.errors import PyggtrainError

# llama.cpp asks at once for room for as many nodes as a graph may ever have: 4 GiB are too few for glm5-next and
# kimi-k3. It may have them once it has read the header, which says how many.
GRAPH_BYTES = 16 << 30


def _capture(
    path: str, num_ctx: int | None, lengths: list[tuple[int, int]], is_document: bool, with_cache: bool
) -> dict[str, object]:
    header_bytes = _bridge.MappedGGUF(path).data_offset
    limit_memory(header_bytes)
    source = _bridge.GraphSource(path, with_lora=True)
    limit_memory(header_bytes, base_bytes=GRAPH_BYTES)
    context = source.context_length if num_ctx is None else num_ctx

    def graph(index: int, num_tokens: int, num_outputs: int) -> list[_bridge.GraphTensor]:
        if not is_document:
            return source.capture(
                num_tokens=num_tokens, num_outputs=num_outputs, num_ctx=context, with_cache=with_cache
            )
        # The last document has other tokens: what llama.cpp writes into its inputs must not depend on them.
        stride = 7 if index == len(lengths) - 1 else 1
        tokens = [(1 + stride * place) % source.num_tokens for place in range(num_tokens)]
        return source.capture_decode(tokens=tokens, num_outputs=num_outputs, num_ctx=context)

    return {
        "window": source.window,
        "window_type": source.window_type,
        "is_causal": source.is_causal,
        "is_diffusion": source.is_diffusion,
        "uses_alibi": source.uses_alibi,
        "attn_temperature": source.attn_temperature,
        "captures": [
            {
                "num_tokens": num_tokens,
                "num_outputs": num_outputs,
                "tensors": [
                    [
                        tensor.name,
                        tensor.op,
                        tensor.role,
                        tensor.type,
                        tensor.shape,
                        tensor.strides,
                        tensor.params,
                        tensor.sources,
                        tensor.view_parent,
                        tensor.view_offset,
                        base64.b64encode(tensor.value).decode(),
                    ]
                    for tensor in graph(index, num_tokens, num_outputs)
                ],
            }
            for index, (num_tokens, num_outputs) in enumerate(lengths)
        ],
    }


def main() -> int:
    """Arguments in argv[1] as JSON: [path, num_ctx or null, [[num_tokens, num_outputs], ...], one document each,
    with a cache].
    """
    path, num_ctx, lengths, is_document, with_cache = json.loads(sys.argv[1])
    try:
        graphs = _capture(path, num_ctx, lengths, is_document, with_cache)
    except PyggtrainError as error:
        sys.stderr.write(str(error))
        return error.exit_code
    json.dump(graphs, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
