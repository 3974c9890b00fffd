"""A Gemma-2-shaped decoder in Flax NNX: train it, generate with it, bring real weights to it.

python -m examples.gemma2.train                           # what `make demo` runs
python -m examples.gemma2.generate "The with statement"   # continues a prompt
python -m examples.gemma2.convert FOLDER OUT              # Hugging Face weights, if you have them
"""
