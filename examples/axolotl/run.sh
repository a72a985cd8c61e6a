#!/bin/sh
# From a configuration of Axolotl to an exported model: run it in an empty directory. It needs no GPU and no network.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
cp "$here/axolotl.yml" .
python "$here/make_inputs.py" # instead of your model and documents
set -x
ray-ulysses init --from axolotl.yml --gpus 0 --out ours.yaml
ray-ulysses plan ours.yaml
ray-ulysses train ours.yaml
ray-ulysses generate outputs/tiny-sft --prompt 'def ' --max-new-tokens 40
ray-ulysses export outputs/tiny-sft --out exported
