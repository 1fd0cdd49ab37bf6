"""The child process of `capture`: lets llama.cpp build a file's graphs and writes them to stdout as JSON.

llama.cpp aborts the process where it cannot build a graph, so nothing else runs here. Not meant to be started by hand.
"""

import json
import sys

from pyggtrain import _bridge
from pyggtrain.errors import PyggtrainError


def _capture(path: str, num_ctx: int | None, lengths: list[tuple[int, int]]) -> dict[str, object]:
    source = _bridge.GraphSource(path, with_lora=True)
    context = source.context_length if num_ctx is None else num_ctx
    return {
        "window": source.window,
        "window_type": source.window_type,
        "is_causal": source.is_causal,
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
                    ]
                    for tensor in source.capture(num_tokens=num_tokens, num_outputs=num_outputs, num_ctx=context)
                ],
            }
            for num_tokens, num_outputs in lengths
        ],
    }


def main() -> int:
    """Arguments in argv[1] as JSON: [path, num_ctx or null, [[num_tokens, num_outputs], ...]]."""
    path, num_ctx, lengths = json.loads(sys.argv[1])
    try:
        graphs = _capture(path, num_ctx, lengths)
    except PyggtrainError as error:
        sys.stderr.write(str(error))
        return error.exit_code
    json.dump(graphs, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
