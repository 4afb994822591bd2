"""A BERT encoder with LoRA adapters in its attention layers."""

from peft import LoraConfig, TaskType, get_peft_model
from transformers import BertConfig, BertForSequenceClassification


def adapted(shape, classes, words=20_000, hidden=512, layers=1, rank=16):
    """Return a frozen encoder with trainable adapters and a trainable classifier. Inputs: input_ids, attention_mask."""
    config = BertConfig(
        vocab_size=words,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        intermediate_size=hidden,
        max_position_embeddings=64,
        num_labels=classes,
        initializer_range=hidden**-0.5,  # without pretraining, this value keeps outputs as large as inputs
    )
    adapters = LoraConfig(task_type=TaskType.SEQ_CLS, r=rank, lora_alpha=2 * rank, target_modules=["query", "value"])
    return get_peft_model(BertForSequenceClassification(config), adapters)
