"""Ray Train with Hugging Face: prepare_trainer, fed by Ray Data's iter_torch_batches."""

import driven
from common import BATCH, EVERY, Arguments, Losses, Planted, tiny_llama
from hf_trainer import AfterStep
from ray.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer
from transformers import Trainer, TrainingArguments, set_seed


def train_loop(args: Arguments) -> None:
    """Train on one worker."""
    set_seed(0)
    planted, losses = Planted(args), Losses(args)
    model = tiny_llama(planted)
    losses.of(model)
    trainer = Trainer(
        model=model,
        train_dataset=driven.batches("train", args),
        eval_dataset=driven.batches("validation", args) if args.validate else None,
        callbacks=[AfterStep(planted), RayTrainReportCallback()],
        args=TrainingArguments(
            output_dir=str(args.out),
            max_steps=args.steps,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=args.micro,
            eval_strategy="steps" if args.validate else "no",
            eval_steps=EVERY,
            save_strategy="no",
            use_cpu=True,
            logging_steps=10,
            report_to=[],
            disable_tqdm=True,
        ),
    )
    prepare_trainer(trainer).train()
    losses.write(model)


if __name__ == "__main__":
    driven.main(train_loop)
