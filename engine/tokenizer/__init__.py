"""Text to token ids and back: tokenizers, incremental detokenization, stop strings and the one text assembler.

Knows the files that vocabularies come in and the events of one request. Knows nothing of models, scheduling or HTTP.
"""

from engine.tokenizer.assembler import TextAssembler
from engine.tokenizer.base import IncrementalDetokenizer, Tokenizer
from engine.tokenizer.load import load_tokenizer
from engine.tokenizer.stop import StopMatcher

__all__ = ["IncrementalDetokenizer", "StopMatcher", "TextAssembler", "Tokenizer", "load_tokenizer"]
