"""What runs inside the training process: marks, rows, samplers and the thread that sends them."""
