"""How much a run gets through: samples, tokens and FLOPs a second, and when it will be over."""
