"""What a short run imports, for processes that are forked from one that has it all."""

import transformers.models.llama.modeling_llama  # noqa: F401

import offbeat.cli
import offbeat.cluster.launch
import offbeat.cluster.local
import offbeat.rollout.transformers_engine
import offbeat.train.trainer
import offbeat.weights.transport  # noqa: F401
