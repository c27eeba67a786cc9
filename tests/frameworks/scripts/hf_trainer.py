"""Hugging Face Trainer, as its examples have it."""

from common import BATCH, EVERY, Losses, Planted, arguments, data, held_out, tiny_llama
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed


class AfterStep(TrainerCallback):
    """What a user does between two steps."""

    def __init__(self, planted: Planted) -> None:
        self.planted = planted

    def on_step_end(self, *_args: object, **_keywords: object) -> None:
        """Take time, if that is planted."""
        self.planted.sleep("between")


def main() -> None:
    """Train."""
    args = arguments()
    set_seed(0)
    planted, losses = Planted(args), Losses(args)
    model = tiny_llama(planted)
    losses.of(model)
    callbacks = [AfterStep(planted)]
    if args.adapter:
        import traceml_ray

        callbacks.append(traceml_ray.TraceMLTrainerCallback())
    trainer = Trainer(
        model=model,
        train_dataset=data(args),
        eval_dataset=held_out(args),
        callbacks=callbacks,
        args=TrainingArguments(
            output_dir=str(args.out),
            max_steps=args.steps,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=args.micro,
            eval_strategy="steps" if args.validate else "no",
            eval_steps=EVERY,
            save_strategy="steps" if args.checkpoint else "no",
            save_steps=EVERY,
            dataloader_num_workers=1 if args.workers else 0,
            bf16=args.bf16,
            torch_compile=args.compile,
            use_cpu=True,
            logging_steps=10,
            report_to=[],
            disable_tqdm=True,
        ),
    )
    trainer.train()
    losses.write(model)
    trainer.accelerator.end_training()  # without it, a process of torch's now and then aborts as it exits


if __name__ == "__main__":
    main()
