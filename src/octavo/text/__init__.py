"""Text in, text out: tokenizers, chat templates, streaming detokenisation, stop strings.

Knows nothing of models, caches or requests, and loads neither torch nor transformers. Importing this package
or one of its modules is cheap: `tokenizers` and `jinja2` are imported when a tokenizer is loaded or a
template rendered.
"""
