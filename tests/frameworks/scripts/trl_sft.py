"""TRL's SFTTrainer with a LoRA adapter of PEFT."""

from typing import Any

from common import BATCH, VOCABULARY, Losses, Planted, arguments, tiny_llama
from datasets import Dataset
from hf_trainer import AfterStep
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling


class Collator(DataCollatorForLanguageModeling):
    """TRL's own, late if that is planted."""

    planted: Planted

    def torch_call(self, examples: Any) -> Any:
        """Return the batch."""
        self.planted.sleep("data")
        return super().torch_call(examples)


def main() -> None:
    """Train."""
    args = arguments()
    set_seed(0)
    planted, losses = Planted(args), Losses(args)
    model = tiny_llama(planted)
    losses.of(model)
    words = {"<pad>": 0, "<eos>": 1} | {str(number): number for number in range(2, VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, "<pad>")), pad_token="<pad>", eos_token="<eos>"
    )
    collator = Collator(pad_token_id=0)
    collator.planted = planted
    length = args.steps * args.micro * BATCH * 2
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        data_collator=collator,
        train_dataset=Dataset.from_dict(
            {
                "input_ids": [
                    [(2 + number * place) % VOCABULARY for place in range(16)] for number in range(length)
                ]
            }
        ),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
        callbacks=[AfterStep(planted)],
        args=SFTConfig(
            output_dir=str(args.out),
            max_steps=args.steps,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=args.micro,
            gradient_checkpointing=False,
            bf16=args.bf16,
            use_cpu=True,
            save_strategy="no",
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
