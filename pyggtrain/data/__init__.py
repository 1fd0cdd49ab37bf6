"""Training data: files of rows in, token ids with labels out, and a report of everything that happened on the way."""

from pyggtrain.data.chat_template import ChatTemplate
from pyggtrain.data.encode import load_examples, load_pairs
from pyggtrain.data.examples import Example, ExamplePair
from pyggtrain.data.order import epoch_order
from pyggtrain.data.preview import preview
from pyggtrain.data.report import EncodeReport
from pyggtrain.data.settings import DataSettings

__all__ = [
    "ChatTemplate",
    "DataSettings",
    "EncodeReport",
    "Example",
    "ExamplePair",
    "epoch_order",
    "load_examples",
    "load_pairs",
    "preview",
]
