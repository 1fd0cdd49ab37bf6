"""Training data: files of rows in, token ids with labels out, and a report of everything that happened on the way."""

from pyggtrain.data.chat_template import ChatTemplate
from pyggtrain.data.encode import DataSettings, EncodeReport, Example, load_examples
from pyggtrain.data.order import epoch_order
from pyggtrain.data.preview import preview

__all__ = ["ChatTemplate", "DataSettings", "EncodeReport", "Example", "epoch_order", "load_examples", "preview"]
