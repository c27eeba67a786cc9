"""An optimizer for the scripts of tests that start many processes."""

DESCENT = """
class Descent(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    def add_param_group(self, group):
        self.param_groups.append({**group, "params": list(group["params"])})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= 0.01 * parameter.grad

    def zero_grad(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
"""
"""
Gradient descent that does not import torch's compiler. Each of torch's own optimizers imports it, as does
DDP, and that import is half of the CPU time of a small process.
"""
