"""Ray Train with Lightning."""

import driven
import lightning_fit
import ray.train.lightning as rtl
from common import Arguments


def train_loop(args: Arguments) -> None:
    """Train on one worker."""
    environment = rtl.RayLightningEnvironment()
    lightning_fit.fit(args, environment, devices="auto", strategy=rtl.RayDDPStrategy())


if __name__ == "__main__":
    driven.main(train_loop)
