"""Trains on sequences that are split over devices: the Gemma-2-shaped model on data x context (x tensor).

python -m examples.long_context.train --devices 8 --data 2 --context 4
"""
